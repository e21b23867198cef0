"""What every way of decoding owes its user, for every drafter in the registry."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hidden_answers import generated
from laws import law_of_three_tokens, p_value
from tiny import END, random_prompts
from transformers import GenerationConfig

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.errors import UserError
from drafthead.core.sampling import LEAST_DRAFT_PROBABILITY, RowRandom, SamplingConfig
from drafthead.core.trees.guesses import Proposal
from drafthead.core.trees.tree import TokenTree
from drafthead.infer import Decoder
from drafthead.infer.planning.planner import Planner, Propose
from drafthead.infer.verifiers import VERIFIERS, Acceptance
from drafthead.lab.exactness.oracle import OracleDecoder

MAX_NEW, PROMPTS = 48, random_prompts(25)


@pytest.fixture(scope="module")
def greedy_answers(target) -> list[list[int]]:
    """What transformers' own greedy decoding says to the prompts."""
    answers = [generated(target.model, prompt, MAX_NEW) for prompt in PROMPTS]
    assert sum(END in answer for answer in answers) > 2, "some answers must end by themselves"
    return answers


@pytest.mark.parametrize("batch", [1, 25])
def test_plain_decoding_equals_transformers(target, greedy_answers, batch) -> None:
    decoder = Decoder(target)
    for start in range(0, 25, batch):
        result = decoder.generate(PROMPTS[start : start + batch], max_new_tokens=MAX_NEW)
        assert result.sequences == greedy_answers[start : start + batch]
        assert result.stats.tau == 1.0


class Alternating(Planner):
    """Every budget of a drafter in turn, with plain steps in between."""

    def __init__(self, drafter: Drafter):
        self.budgets, self.step = drafter.budgets, -1

    def draft(self, propose: Propose, ahead: bool = False) -> Proposal | None:
        self.step += 1
        place, drafts = divmod(self.step, 2)
        return propose(self.budgets[place % len(self.budgets)]) if drafts else None

    def learn(self, accept_lengths: object, seconds: float) -> None:
        pass


def test_a_plan_may_change_the_tree_at_every_step_or_leave_it_out(
    target, make_drafter, greedy_answers, drafter_name, monkeypatch
) -> None:
    decoder = Decoder(target, make_drafter(drafter_name, target), adaptive=True)
    monkeypatch.setattr(decoder, "_planner", lambda run, rule: Alternating(decoder.drafter))
    for rows in (slice(0, 1), slice(1, 6)):
        result = decoder.generate(PROMPTS[rows], max_new_tokens=MAX_NEW)
        assert result.sequences == greedy_answers[rows]


def test_decodings_that_take_turns_pass_by_pass_do_not_disturb_each_other(
    target, make_drafter, greedy_answers, drafter_name
) -> None:
    decoder = Decoder(target, make_drafter(drafter_name, target))
    answers: dict[int, list[int]] = {0: [], 1: []}
    both = [decoder.steps(prompt, max_new_tokens=MAX_NEW) for prompt in PROMPTS[:2]]
    running = dict(enumerate(both))
    while running:
        for number, steps in list(running.items()):
            emitted = next(steps, None)
            if emitted is None:
                del running[number]
            else:
                answers[number] += emitted[0]
    assert [answers[0], answers[1]] == greedy_answers[:2]
    for stream, answer in zip(both, answers.values(), strict=True):
        assert stream.stats.decoded_tokens == [len(answer) - 1]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.2, "verifier": "rejection"},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        {"generation_config": GenerationConfig(repetition_penalty=1.4, no_repeat_ngram_size=2)},
    ],
    ids=["greedy", "drawn", "filtered", "processed"],
)
def test_plain_decoding_equals_the_oracle_that_knows_no_trees_and_no_rules(target, options) -> None:
    """The engine's plain step is a tree of the root alone; the last prompt fills the context."""
    prompts = [*random_prompts(5), [9] * 240]
    expected = OracleDecoder(target).generate(prompts, max_new_tokens=40, seed=3, **options)
    found = Decoder(target).generate(prompts, max_new_tokens=40, seed=3, **options)
    assert found.sequences == expected.sequences and found.finished == expected.finished
    assert found.stats.accept_lengths == expected.stats.accept_lengths


def test_every_drafter_draws_from_the_law_that_rules_test_at_any_temperature(
    target, make_drafter, drafter_name, monkeypatch
) -> None:
    """In float64, and without entries so small that quotients of them lose digits."""
    seen = []
    rule = VERIFIERS["rejection"]

    def spy(tree: TokenTree, scores: torch.Tensor, random: RowRandom | None) -> Acceptance:
        seen.append(tree.draft_probs)
        return rule.rule(tree, scores, random)

    monkeypatch.setitem(VERIFIERS, "rejection", replace(rule, rule=spy))
    decoder = Decoder(target, make_drafter(drafter_name, target))
    for temperature in (1.0, 0.05, 0.01, 0.001):
        decoder.generate(
            random_prompts(2), max_new_tokens=8, temperature=temperature, verifier="rejection"
        )
    assert seen
    for probs in seen:
        if probs is not None:  # prompt lookup's children are not drawn
            assert probs.dtype == torch.float64
            assert ((probs == 0) | (probs >= LEAST_DRAFT_PROBABILITY)).all()


def test_a_drafter_that_is_always_right_has_its_whole_chain_accepted(target, make_drafter) -> None:
    decoder = Decoder(target, make_drafter("self", target))
    stats = decoder.generate(random_prompts(4), max_new_tokens=40).stats
    assert set(stats.acceptance_by_depth()) == {1.0}
    assert {n for row in stats.accept_lengths for n in row} == {4}


@pytest.mark.parametrize("verifier", sorted(n for n, v in VERIFIERS.items() if not v.greedy))
def test_a_rows_sample_does_not_depend_on_the_rows_beside_it(
    target, make_drafter, verifier
) -> None:
    """By any rule; of any drafter under one of them: test_every_drafter.py."""
    decoder, prompts = Decoder(target, make_drafter("medusa:tree", target)), random_prompts(4)
    options = {"max_new_tokens": 24, "temperature": 1.0, "verifier": verifier}
    together = decoder.generate(prompts, seed=[5, 6, 7, 8], **options).sequences
    alone = [decoder.generate(p, seed=5 + i, **options).sequences[0] for i, p in enumerate(prompts)]
    assert together == alone
    assert decoder.generate(prompts, seed=[5, 6, 7, 8], **options).sequences == together
    assert decoder.generate(prompts, seed=9, **options).sequences != together


LOSSLESS = sorted(n for n, v in VERIFIERS.items() if v.lossless and not v.greedy)
# Rules see only the resulting probabilities, so one setting that leaves zeros serves for each.
LAW_CASES = {
    "plain": ("auto", SamplingConfig(temperature=1.0)),
    "top-p": ("auto", SamplingConfig(temperature=1.3, top_p=0.8)),
} | {f"top-k-{rule}": (rule, SamplingConfig(temperature=0.6, top_k=3)) for rule in LOSSLESS}


@pytest.mark.parametrize(("verifier", "sampling"), LAW_CASES.values(), ids=LAW_CASES)
def test_the_engines_samples_follow_the_targets_law(
    make_target, make_drafter, lawful_drafter, verifier, sampling
) -> None:
    """Chi-square over the 64 continuations of a 4-token target; false alarm 1e-5 a case."""
    target = make_target(seed=3, vocab=4)
    decoder = Decoder(target, make_drafter(lawful_drafter, target))
    prompt, count = [1, 2, 3], 6000
    result = decoder.generate(
        [prompt] * count,
        max_new_tokens=3,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        verifier=verifier,
    )
    law = law_of_three_tokens(target, prompt, sampling)
    assert p_value(result.sequences, law) > 1e-5


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 9}], ids=str)
def test_a_draft_knows_the_numbers_of_the_targets_draws(target, make_drafter, options) -> None:
    """Of a draft that is the target itself every token is accepted, at any temperature."""
    decoder = Decoder(target, make_drafter("self", target))
    found = decoder.generate(
        random_prompts(6), max_new_tokens=24, temperature=1.3, verifier="match", **options
    )
    lengths = [length for row in found.stats.accept_lengths for length in row]
    # The vocabulary is not larger than a draft's support: nothing of the law is missing there.
    assert set(lengths) == {4}


@pytest.mark.parametrize("draft_temperature", [0.3, 3.0])
def test_the_drafts_temperature_is_free(make_target, make_drafter, draft_temperature) -> None:
    target = make_target(seed=3, vocab=4)
    decoder = Decoder(
        target, make_drafter("medusa:tree", target), draft_temperature=draft_temperature
    )
    prompt, count, sampling = [1, 2, 3], 6000, SamplingConfig(temperature=1.0)
    options = {"max_new_tokens": 3, "temperature": 1.0, "verifier": "rejection"}
    result = decoder.generate([prompt] * count, **options)
    law = law_of_three_tokens(target, prompt, sampling)
    assert p_value(result.sequences, law) > 1e-5
    as_target = Decoder(target, make_drafter("medusa:tree", target))
    usual = as_target.generate([prompt] * count, **options)
    assert result.sequences != usual.sequences, "children are drawn at another temperature"


def test_long_answers_outgrow_the_first_cache(target, make_drafter) -> None:
    prompt = [9, 10]
    plain = Decoder(target)
    plain.end_ids = frozenset()
    decoder = Decoder(target, make_drafter("medusa:tree", target))
    decoder.end_ids = frozenset()
    expected = plain.generate(prompt, max_new_tokens=1000).sequences
    assert len(expected[0]) == 256 - len(prompt), "decoding ends with the context"
    assert decoder.generate(prompt, max_new_tokens=1000).sequences == expected


def test_counts_say_what_was_returned(target, make_drafter) -> None:
    decoder = Decoder(target, make_drafter("medusa:tree", target))
    result = decoder.generate(random_prompts(3), max_new_tokens=20)
    stats = result.stats
    assert stats.decoded_tokens == [len(s) - 1 for s in result.sequences]
    assert stats.steps == max(map(len, stats.accept_lengths))
    for sequence, lengths in zip(result.sequences, stats.accept_lengths, strict=True):
        assert len(sequence) - 1 <= sum(lengths) <= len(sequence) - 1 + 3
    assert stats.tau == sum(stats.decoded_tokens) / sum(map(len, stats.accept_lengths))
    assert all(stats.seconds[phase] > 0 for phase in stats.seconds)
    assert sum(stats.seconds.values()) - stats.seconds["prefill"] <= stats.decode_seconds


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"prompts": []}, "no prompt"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1] * 256]}, "context holds 256"),
        ({"prompts": [[99]]}, "token id 99"),
        ({"prompts": "text"}, "no tokenizer"),
        ({"prompts": [1], "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompts": [1], "verifier": "gready"}, "unknown verifier 'gready'.*greedy"),
        ({"prompts": [1], "verifier": "greedy", "temperature": 1.0}, "would ignore temperature"),
        ({"prompts": [1], "verifier": "typical"}, "temperature above 0"),
        (
            {"prompts": [1], "max_new_tokens": 3.5},
            r"max_new_tokens must be an integer, got 3.5 \(float",
        ),
        (
            {"prompts": [1], "max_new_tokens": "3"},
            r"max_new_tokens must be an integer, got '3' \(str",
        ),
        ({"prompts": [1], "max_new_tokens": True}, "max_new_tokens must be an integer"),
        ({"prompts": [[1], [2]], "seed": [1]}, "2 answers need 2 seeds"),
        ({"prompts": [1], "seed": 0.5}, r"seed must be an integer, got 0.5 \(float"),
        ({"prompts": [1], "seed": [None]}, r"a seed must be an integer, got None \(NoneType"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(target, options, complaint) -> None:
    with pytest.raises(UserError, match=complaint):
        Decoder(target).generate(**options)


def test_integers_of_every_library_are_options(target) -> None:
    decoder = Decoder(target)
    rows = {"prompts": [[9, 8], [5]], "temperature": 1.0}
    expected = decoder.generate(**rows, max_new_tokens=6, seed=[3, 4]).sequences
    for seed in (3, np.int64(3), torch.tensor(3), np.array([3, 4]), torch.tensor([3, 4]), (3, 4)):
        for count in (6, np.int32(6), torch.tensor(6)):
            found = decoder.generate(**rows, max_new_tokens=count, seed=seed)
            assert found.sequences == expected, (seed, count)


def test_without_a_seed_answers_differ(target) -> None:
    rows = {"prompts": [9, 8], "temperature": 1.0, "max_new_tokens": 30, "seed": None}
    answers = [Decoder(target).generate(**rows).sequences for _ in range(2)]
    assert answers[0] != answers[1]


def test_an_unknown_option_is_refused_with_the_nearest_name(target) -> None:
    with pytest.raises(TypeError, match="'temprature'.*did you mean 'temperature'"):
        Decoder(target).steps([1], temprature=1.0)
    with pytest.raises(UserError, match="unknown option 'x': Options: max_new_tokens"):
        Decoder(target).steps([1], x=True)


@pytest.mark.parametrize("model", [None, 5, {"target": "model"}])
def test_what_is_no_model_is_refused(model) -> None:
    with pytest.raises(UserError, match="a target is the name of a model"):
        Decoder.from_pretrained(model)
