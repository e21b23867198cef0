"""The proof of exactness has power: what is exact passes and what is not fails, part by part."""

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from scipy.stats import chi2
from stages import more

from drafthead.core.errors import UserError
from drafthead.core.kv_cache.column_cache import ColumnCache
from drafthead.core.sampling import SamplingConfig
from drafthead.infer import Decoder
from drafthead.infer.verifiers import VERIFIERS, Verifier
from drafthead.infer.verifiers.base import Acceptance
from drafthead.lab.exactness.exactness import (
    Evidence,
    LaterTokens,
    SampledPair,
    drawn_differences,
    greedy_differences,
    is_near_tie,
    later_tokens,
    rounding_doubt,
    sampled_start,
)
from drafthead.lab.exactness.goodness_of_fit import chance_of_worse, detectable, fit, pooled
from drafthead.lab.exactness.rule_law import fit_of_rule
from drafthead.lab.exactness.target_law import OTHER, TargetLaw, penalised, places_in_law
from drafthead.lab.races.divergence import Divergence, rounding_step
from drafthead.lab.reports.exactness import verdict

SAMPLING = [v for v in VERIFIERS.values() if not v.greedy]
LOSSLESS = sorted(v.name for v in SAMPLING if v.lossless)
LOSSY = sorted(v.name for v in SAMPLING if not v.lossless)
PROMPTS = [[9, 10, 11], [12, 13]]
AT_ONE = SamplingConfig(temperature=1.0)


def commit_without_moving(
    cache: ColumnCache, path: torch.Tensor | None, lengths: torch.Tensor, longest: int
) -> None:
    """A commit that leaves accepted columns where the tree had them."""
    cache.lengths, cache.longest, cache.pending = lengths, longest, 0


# ---- the statistics -----------------------------------------------------------------------------


def test_rare_cells_are_pooled() -> None:
    counts, probs = torch.tensor([48.0, 4, 46, 2]), torch.tensor([0.50, 0.03, 0.46, 0.01])
    assert [values.tolist() for values in pooled(counts, probs, 100)] == [
        [48, 52],
        pytest.approx([0.50, 0.50]),
    ]
    # With 200 samples 6 are expected in the third cell, too few in the last: it joins that one.
    assert pooled(counts, probs, 200)[0].tolist() == [48, 46, 4 + 2]


def test_a_fit_by_hand() -> None:
    found = fit(torch.tensor([60, 40, 0]), torch.tensor([0.5, 0.5, 0.0]))
    assert found.statistic == pytest.approx(2 * 10**2 / 50)
    assert found.total_variation == pytest.approx(0.1)
    assert (found.cells, found.impossible, found.standard_error) == (2, 0, pytest.approx(0.05))
    assert chance_of_worse([found]) == pytest.approx(chi2.sf(4, 1))
    assert chance_of_worse([fit(torch.tensor([60, 40, 1]), torch.tensor([0.5, 0.5, 0.0]))]) == 0


def test_what_is_promised_to_be_found_is_found() -> None:
    """Laws at the promised distance, in the direction that is hardest to see, and the true law."""
    true, count, false_alarm = torch.full((20,), 0.05), 5000, 0.01
    generator = torch.Generator().manual_seed(0)

    def share_found(law: torch.Tensor) -> float:
        samples = torch.multinomial(law, 400 * count, True, generator=generator).view(400, count)
        fits = [fit(torch.bincount(row, minlength=20), true) for row in samples]
        return sum(chance_of_worse([each]) < false_alarm for each in fits) / len(fits)

    promised = detectable([fit(count * true, true)], false_alarm, 0.99)
    signs = torch.tensor([1.0, -1.0]).repeat(10)
    assert share_found(true + promised * signs / 10) > 0.97
    assert share_found(true + 0.4 * promised * signs / 10) < 0.5
    assert share_found(true) < 0.03
    assert detectable([fit(torch.tensor([5]), torch.tensor([1.0]))], 0.01, 0.99) == math.inf


# ---- the rule on tables -------------------------------------------------------------------------


def always_first(tree, scores, random) -> Acceptance:
    """A wrong rule: `rejection` that now and then takes the first child unasked."""
    found = VERIFIERS["rejection"].rule(tree, scores, random)
    hasty = random.uniform() < 0.3
    first = found.path.clone()
    first[:, 1:] = torch.tensor([1, *[0] * (first.shape[1] - 2)])
    return Acceptance(
        torch.where(hasty[:, None], first, found.path),
        torch.where(hasty, 2, found.length),
        torch.where(hasty, scores[:, 1].argmax(-1), found.bonus),
    )


@pytest.fixture
def hasty(monkeypatch) -> str:
    """The name of a biased rule that claims to be lossless."""
    rule = Verifier(
        "hasty", always_first, True, "probs", greedy=False, draws_children=True, follows=False
    )
    monkeypatch.setitem(VERIFIERS, "hasty", rule)
    return "hasty"


def fits_on_tables(name: str) -> list:
    return [fit_of_rule(VERIFIERS[name], seed, batches=1) for seed in (0, 1)]


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_lossless_rule_passes_on_tables(name) -> None:
    assert chance_of_worse(fits_on_tables(name)) > 1e-3


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_rule_fails_on_tables(name) -> None:
    assert chance_of_worse(fits_on_tables(name)) < 1e-9


def test_a_biased_rule_fails_on_tables(hasty) -> None:
    assert chance_of_worse(fits_on_tables(hasty)) < 1e-9


# ---- sampled answers ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(make_target):
    """A target of 16 tokens, one of which ends answers."""
    return make_target(seed=3, vocab=16)


def evidence_of(decoder: Decoder, target, name: str, sampling=AT_ONE) -> Evidence:
    """Both sampled parts, small."""
    pair = SampledPair(decoder, target, sampling, name)
    starts = [
        sampled_start(pair, prompt, 600, seed=600 * number) for number, prompt in enumerate(PROMPTS)
    ]
    later = later_tokens(pair, PROMPTS, 64, 24, seed=5000)
    return Evidence(target.dtype, 1e-3, [], starts, later, [])


def p_values(evidence: Evidence) -> tuple[float, float]:
    parts = list(evidence.parts.values())
    return chance_of_worse(parts[1]), chance_of_worse(parts[2])


@pytest.mark.parametrize("drafter", [more("medusa:tree"), "draft-model"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_answers_pass(small, make_drafter, name, drafter) -> None:
    decoder = Decoder(small, make_drafter(drafter, small))
    evidence = evidence_of(decoder, small, name)
    assert evidence.failures() == []
    assert evidence.later.accepted > 0.03, "a drafter of which nothing is accepted tests nothing"


@pytest.mark.parametrize("name", [*LOSSY, "hasty"])
def test_lossy_and_biased_answers_fail_in_both_parts(small, make_drafter, hasty, name) -> None:
    evidence = evidence_of(Decoder(small, make_drafter("draft-model", small)), small, name)
    assert max(p_values(evidence)) < evidence.level
    assert len(evidence.failures()) == 2


def test_a_repetition_penalty_is_part_of_the_law(small, make_drafter) -> None:
    decoder = Decoder(small, make_drafter("draft-model", small))
    pair = SampledPair(decoder, small, AT_ONE, "rejection", 1.5)
    assert chance_of_worse([sampled_start(pair, PROMPTS[0], 600, seed=0).fit]) > 1e-3
    assert chance_of_worse([later_tokens(pair, PROMPTS, 64, 24, seed=0).fit]) > 1e-3


def test_answers_with_another_penalty_fail(small, make_drafter, monkeypatch) -> None:
    decoder = Decoder(small, make_drafter("draft-model", small))
    pair = SampledPair(decoder, small, AT_ONE, "rejection", 1.5)
    monkeypatch.setattr(SampledPair, "generation_config", None)
    assert chance_of_worse([sampled_start(pair, PROMPTS[0], 600, seed=0).fit]) < 1e-6
    assert chance_of_worse([later_tokens(pair, PROMPTS, 64, 24, seed=0).fit]) < 1e-6


def test_penalised_logits_are_transformers_for_each_text() -> None:
    ids, logits = torch.tensor([[0, 2], [1, 1]]), torch.tensor([[3.0, 2, -4], [3, 2, -4]])
    expected = torch.tensor([[1.5, 2, -8], [3, 1, -4]])
    assert torch.equal(penalised((), ids, logits, 2.0), expected)
    assert torch.equal(penalised((0,), ids[:1, 1:], logits[:1], 2.0), expected[:1])


def test_a_token_outside_the_support_fails_at_once(small, make_drafter) -> None:
    """Answers at top-k 3 are judged by the law of top-k 2."""
    decoder = Decoder(small, make_drafter("draft-model", small))
    law = TargetLaw(small, PROMPTS[0], replace(AT_ONE, top_k=2), 600, decoder.end_ids)
    result = decoder.generate([PROMPTS[0]] * 64, max_new_tokens=3, temperature=1.0, top_k=3)
    assert any(map(law.is_impossible, result.sequences))
    allowed = decoder.generate([PROMPTS[0]] * 64, max_new_tokens=3, temperature=1.0, top_k=2)
    assert not any(map(law.is_impossible, allowed.sequences))
    refuted = LaterTokens(counts=torch.full((20,), 100), impossible=1)
    evidence = Evidence(torch.float32, 1e-3, [], [], refuted, [])
    assert "1 samples of probability 0" in evidence.failures()[0]


def test_a_verdict_names_what_there_were_too_few_samples_for() -> None:
    later = LaterTokens(counts=torch.full((20,), 500))
    said = verdict(Evidence(torch.float32, 1e-3, [], [], later, []), "match")
    assert re.search(r"variation of 0\.\d+ in later tokens would have been found in 90%", said)
    assert "too few samples to test rule on tables, first 3 tokens" in said and "inf" not in said


def test_a_damaged_cache_fails(small, make_drafter, monkeypatch) -> None:
    """Accepted nodes that are not moved to their place spoil what comes after."""
    monkeypatch.setattr(ColumnCache, "commit", commit_without_moving)
    decoder = Decoder(small, make_drafter("draft-model", small))
    later = later_tokens(SampledPair(decoder, small, AT_ONE, "match"), PROMPTS, 64, 24, seed=0)
    assert chance_of_worse([later.fit]) < 1e-9


def test_the_law_is_the_models_and_its_cells_share_it_out(small) -> None:
    law = TargetLaw(small, PROMPTS[0], AT_ONE, 1000, frozenset({7}))
    assert sum(law.chances.values()) == pytest.approx(1, abs=1e-5)
    text = max(text for text in law.chances if len(text) == 3 and OTHER not in text)
    logits = small.model(torch.tensor([[*PROMPTS[0], *text]])).logits[0, 2:-1]
    steps = logits.softmax(-1)[torch.arange(3), list(text)]
    assert law.chances[text] == pytest.approx(float(steps.prod()), rel=1e-4)
    assert law.cell([*text, 1]) == text
    unlisted = next(t for t in range(16) if (*text[:2], t) not in law.chances)
    assert law.cell([*text[:2], unlisted]) == (*text[:2], OTHER)
    ended = next(text for text in law.chances if text[-1] == 7)
    assert law.cell(ended) == ended


def test_places_go_from_the_most_to_the_least_probable_token(small) -> None:
    answer = [3, 1, 4]
    begin, width = places_in_law(small, PROMPTS[0], answer, AT_ONE)
    laws = small.model(torch.tensor([[*PROMPTS[0], 3, 1]])).logits[0, -2:].softmax(-1)
    for law, token, start, own in zip(laws, answer[1:], begin, width, strict=True):
        assert float(own) == pytest.approx(float(law[token]), abs=1e-6)
        assert float(start) == pytest.approx(float(law[law > law[token]].sum()), abs=1e-5)


def test_plain_steps_would_prove_nothing(small, make_drafter) -> None:
    adaptive = Decoder(small, make_drafter("medusa:tree", small), adaptive=True)
    for decoder in (Decoder(small), adaptive):
        with pytest.raises(UserError, match="trees of a fixed size"):
            SampledPair(decoder, small, AT_ONE, "match")


# ---- greedy answers -----------------------------------------------------------------------------


def test_greedy_answers_of_a_sound_engine_are_equal(target, make_drafter) -> None:
    decoder = Decoder(target, make_drafter("medusa:tree", target))
    assert greedy_differences(decoder, target, PROMPTS, 40) == []


@pytest.mark.parametrize("fault", ["rule", "cache"])
def test_a_greedy_difference_that_is_no_tie_fails(target, make_drafter, monkeypatch, fault) -> None:
    if fault == "rule":
        wrong = replace(VERIFIERS["greedy"], rule=lambda tree, scores, _: Acceptance(
            torch.zeros_like(tree.tokens[:, :1]),
            torch.ones_like(tree.tokens[:, 0]),
            scores[:, 0].topk(2).indices[:, 1],
        ))  # fmt: skip
        monkeypatch.setitem(VERIFIERS, "greedy", wrong)
    else:
        monkeypatch.setattr(ColumnCache, "commit", commit_without_moving)
    decoder = Decoder(target, make_drafter("medusa:tree", target))
    found = greedy_differences(decoder, target, PROMPTS, 40)
    (failure,) = Evidence(torch.float32, 1e-3, [], [], None, found).failures()
    assert failure.startswith("greedy answers: ") and "more than rounding" in failure


@pytest.mark.parametrize(
    ("dtype", "gap", "tie"),
    [
        (torch.bfloat16, 0.125, True),  # between 16 and 32 its numbers are 1/8 apart
        (torch.bfloat16, 0.25, False),
        (torch.float32, 1e-4, True),
        (torch.float32, 1e-3, False),
    ],
)
def test_a_near_tie_is_within_the_rounding_of_the_dtype(dtype, gap, tie) -> None:
    step = rounding_step(20.0, dtype)
    assert is_near_tie(Divergence("greedy", 0, 0, 1, 2, gap, gap, step), dtype) is tie


def test_near_ties_are_no_excuse_where_passes_have_the_same_bits() -> None:
    tie = Divergence("greedy", 0, 0, 1, 2, 0.125, 0.125, 0.125)
    assert not Evidence(torch.bfloat16, 1e-3, [], [], None, [tie]).failures()
    same_bits = partial(Evidence, torch.bfloat16, 1e-3, [], [], None, same_bits=True)
    assert not same_bits([], drawn=[]).failures()
    assert "nothing is rounded" in same_bits([tie]).failures()[0]
    assert "1 are not plain decoding's" in same_bits([], drawn=[tie]).failures()[0]


def test_answers_drawn_under_match_are_plain_ones(small, make_drafter, monkeypatch) -> None:
    decoder = Decoder(small, make_drafter("medusa:tree", small))
    pair = SampledPair(decoder, small, AT_ONE, "match")
    assert drawn_differences(pair, PROMPTS, 24, seed=3) == []
    monkeypatch.setattr(ColumnCache, "commit", commit_without_moving)
    assert drawn_differences(pair, [PROMPTS[0]] * 4, 24, seed=3)


def test_sixteen_bits_blur_the_law(small, make_drafter) -> None:
    decoder = Decoder(small, make_drafter("medusa:tree", small))
    pair = SampledPair(decoder, small, AT_ONE, "match")
    starts = [sampled_start(pair, PROMPTS[0], 100, seed=0)]
    assert rounding_doubt(starts, torch.float32, 1.0) < 1e-5
    assert rounding_doubt(starts, torch.bfloat16, 1.0) > 1e-3
    assert rounding_doubt(starts, torch.bfloat16, 0.5) > rounding_doubt(starts, torch.bfloat16, 1.0)
