"""The theory of speculative decoding: formulas, and what they are fed with."""

import random
from itertools import accumulate, pairwise
from math import prod, sqrt

import pytest
import torch
from stages import more
from tiny import random_prompts

from drafthead.core.sampling import SamplingConfig
from drafthead.core.trees.tree import TokenTree, TreeShape
from drafthead.infer import Decoder
from drafthead.infer.loading.loaded import named_draft
from drafthead.infer.verifiers import VERIFIERS
from drafthead.lab.exactness.rule_law import OneStream
from drafthead.lab.reports.theory import prediction_note
from drafthead.lab.speedup_model import (
    ChainPrediction,
    StepParts,
    chain_speedup,
    deviation_factors,
    expected_tokens,
    operations_factor,
    predict_chain,
)
from drafthead.lab.theory.acceptance import Share, counted_alpha, counted_by_depth, share_of
from drafthead.lab.theory.chains import (
    Chains,
    chain_budget,
    head_chains,
    model_chains,
    named_chains,
    operations_ratio,
)
from drafthead.lab.theory.given_answers import GivenAnswer, acceptance_chance, acceptance_chances
from drafthead.lab.theory.theory import mean_at_steps

# Leviathan et al. (2023), Table 1: alpha, gamma, operations and speed for drafts that cost nothing.
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
PROMPTS = [*random_prompts(3), [9, 10, 11, 12] * 4]
LENGTH = 3  # of the chains of the tests' drafters


def test_the_formulas_give_the_papers_numbers() -> None:
    for alpha, length, operations, speed in TABLE_1:
        assert operations_factor(alpha, length, 0.0) == pytest.approx(operations, abs=0.005)
        assert chain_speedup(alpha, length, 0.0) == pytest.approx(speed, abs=0.005)
    assert operations_factor(0.8, 2, 0.5) == pytest.approx((2 * 0.5 + 3) / 2.44)
    assert operations_factor(1.0, 3, 0.0) == 1, "nothing is computed in vain"


def simulated(alpha: float, length: int, steps: int) -> list[list[int]]:
    """Accept lengths of chains whose tokens are each accepted with chance alpha, in 20 answers."""
    chance = random.Random(0)

    def step() -> int:
        return 1 + next((k for k in range(length) if chance.random() >= alpha), length)

    return [[step() for _ in range(steps // 20)] for _ in range(20)]


@pytest.mark.parametrize(("alpha", "length"), [(0.7, 4), (0.3, 2)])
def test_counts_of_a_process_of_known_alpha_agree_with_the_formulas(alpha, length) -> None:
    answers = simulated(alpha, length, 20_000)
    flat = [n for answer in answers for n in answer]
    assert sum(flat) / len(flat) == pytest.approx(expected_tokens(alpha, length), rel=0.02)
    assert predict_chain(flat, length, 0.0).speedup == pytest.approx(
        sum(flat) / len(flat), rel=0.02
    )
    counted = counted_alpha(answers, length)
    assert counted.holds(alpha) and counted.high - counted.low < 0.03
    assert counted.tries == sum(min(n, length) for n in flat)
    for depth in counted_by_depth(answers, length):
        assert depth.value == pytest.approx(alpha, abs=0.05)


def test_tokens_of_one_answer_are_not_taken_for_independent() -> None:
    mixed = share_of([5] * 20, [10] * 20)
    apart = share_of([10] * 10 + [0] * 10, [10] * 20)
    assert mixed == Share(0.5, 0.5, 0.5, 200)
    assert apart.value == 0.5 and apart.high - apart.low > 0.3
    assert share_of([0], [0]).tries == 0


def test_acceptance_by_depth_counts_what_was_reached() -> None:
    first, second = counted_by_depth([[1, 3], [2, 1]], 2)
    assert (first.value, first.tries, second.value, second.tries) == (2 / 4, 4, 1 / 2, 2)


# Two laws over four tokens: the sum of the smaller ones is .1 + .2 + .2 + 0, so TV is .5.
TARGET_PROBS = torch.tensor([0.6, 0.2, 0.2, 0.0])
DRAFT_PROBS = torch.tensor([0.1, 0.3, 0.4, 0.2], dtype=torch.float64)


def chain_of_one(tokens: torch.Tensor, drawn: bool) -> TokenTree:
    """Trees of one guess [B]; if drawn, with the law of the guess, whose tokens are reordered."""
    order = torch.tensor([2, 0, 3, 1])
    tokens = torch.stack([torch.zeros_like(tokens), tokens], dim=1)
    ids = order.expand(len(tokens), 2, 4)
    known = (ids, DRAFT_PROBS[order].expand(len(tokens), 2, 4)) if drawn else ()
    return TokenTree.from_shape(TreeShape.chain(1), tokens, *known)


def test_a_drawn_token_is_accepted_with_chance_one_minus_total_variation() -> None:
    rows = 40_000
    stream = OneStream(rows, torch.Generator().manual_seed(0))
    tokens = torch.multinomial(DRAFT_PROBS, rows, True, generator=stream.generator)
    tree = chain_of_one(tokens, drawn=True)
    scores = TARGET_PROBS.expand(rows, 2, 4)
    accepted = VERIFIERS["rejection"].rule(tree, scores, stream).length == 2
    chance = acceptance_chance(chain_of_one(tokens[:1], drawn=True), TARGET_PROBS)
    assert chance == pytest.approx(0.5)
    assert float(accepted.double().mean()) == pytest.approx(chance, abs=4 * 0.5 / sqrt(rows))


def test_a_chosen_token_is_accepted_with_the_targets_probability() -> None:
    assert acceptance_chance(chain_of_one(torch.tensor([1]), False), TARGET_PROBS) == pytest.approx(
        0.2
    )
    nothing = TokenTree.from_shape(TreeShape(()), torch.tensor([[5]]))
    assert acceptance_chance(nothing, TARGET_PROBS) == 0
    assert acceptance_chance(chain_of_one(torch.tensor([-1]), False), TARGET_PROBS) == 0


def begun(lengths: list[int], places: int) -> list[int]:
    """The places at which steps of these accept lengths begin."""
    return [place for place in accumulate(lengths[:-1], initial=0) if place < places]


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("draft-model", 3.0),
        ("prompt-lookup", 1.0),
        more("medusa:chain", 3.0),
        more("eagle3:chain", 3.0),
    ],
)
def test_computed_chances_are_those_with_which_rejection_accepts(
    name, temperature, target, make_drafter
) -> None:
    """Given what came before, each step's first token is accepted with its computed chance."""
    sampling = SamplingConfig(temperature)
    decoder = Decoder(target, make_drafter(name, target), chain_budget(LENGTH))
    one = make_drafter(name, target)
    surplus, variance = 0.0, 0.0
    for row, prompt in enumerate(PROMPTS * 2):
        options = {"max_new_tokens": 60, "temperature": temperature, "seed": row}
        result = decoder.generate([prompt], **options, verifier="rejection")
        (lengths,), (tokens,) = result.stats.accept_lengths, result.sequences
        chances = acceptance_chances(target, one, GivenAnswer(prompt, tokens, row), sampling)
        for place, length in zip(begun(lengths, len(chances)), lengths, strict=True):
            surplus += (length > 1) - chances[place]
            variance += chances[place] * (1 - chances[place])
    assert variance > 5, "the chances are neither 0 nor 1"
    assert abs(surplus) < 4.5 * sqrt(variance)


def test_chances_at_steps_are_those_of_the_places_where_steps_began() -> None:
    assert mean_at_steps([[0.1, 0.2, 0.3, 0.4, 0.5], []], [[2, 3], []]) == pytest.approx(0.2)


def every_kind(target, make_target, make_head) -> list[Chains]:
    draft = make_target(seed=1, layers=1)
    head = make_head("hydra", target)
    return [
        head_chains("head", head, target),
        model_chains("draft", draft, target),
        named_chains("lookup", named_draft("lookup"), target, "auto"),
    ]


def test_arithmetic_is_that_of_the_passes(target, make_target, make_head) -> None:
    head, draft, lookup = every_kind(target, make_target, make_head)
    own = model_chains("itself", target, target)
    assert operations_ratio(own, 4) == pytest.approx(1, rel=0.02)
    assert operations_ratio(lookup, 4) == 0
    assert 0.2 < operations_ratio(draft, 4) < 0.8, "one layer of two, and the output head"
    assert operations_ratio(head, 2) > 0


def test_the_difference_between_prediction_and_measurement_has_its_reasons() -> None:
    prediction = ChainPrediction(0.5, 0.1, chain_speedup(0.5, 2, 0.1), 2, 1.5, length=2)
    step, plain = StepParts(0.2, 1.2, 0.3), StepParts(0.0, 0.9, 0.1)
    factors = deviation_factors(prediction, tau=1.6, step=step, plain=plain)
    assert prod(factors.values()) == pytest.approx(prediction.speedup / (1.6 / 1.7))
    assert factors["verify"] == pytest.approx(1.5 / 1.2)
    assert factors["host"] == pytest.approx(1.7 / 1.5)
    note = prediction_note("draft, T 0", prediction, 0.9, factors)
    reasons = [note.index(text) for text in ("takes longer than a plain one (+25 %)", "(+13 %)")]
    assert all(a < b for a, b in pairwise(reasons)), "the largest first"
    assert "off" not in prediction_note("draft, T 0", prediction, 1.4, factors)
