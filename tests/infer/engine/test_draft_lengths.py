"""Drafts that may stop early: the planner learns how far they go apart from how right they are."""

import random
from dataclasses import replace

import numpy as np
import pytest

from drafthead.heads.drafting.drafter import NO_OUTLOOK
from drafthead.heads.trees.static import chain_budgets
from drafthead.heads.trees.tree import Budget
from drafthead.infer.engine.acceptance_tracker import Expectations
from drafthead.infer.engine.draft_lengths import DraftLengths
from drafthead.infer.engine.planner import AdaptivePlan, PlannedDecoding
from drafthead.infer.engine.step_costs import Size, StepCosts

CHAINS = chain_budgets(4)
SIZES: list[Size] = [None, *CHAINS]
ALPHA, GOES_ON, LEVEL = 0.8, 0.5, 0.3
CHANCES = {chain: tuple(0.6**depth for depth in range(1, chain.depth + 1)) for chain in CHAINS}
TOOK = {None: 1.0} | {chain: 1 + LEVEL * chain.depth for chain in CHAINS}


def stops(budget: Budget) -> tuple[Budget, ...]:
    return CHAINS[: budget.depth]


def draft(coin: random.Random, most: int) -> tuple[Budget, int]:
    """A chain that goes on after every other token, and the tokens that a step commits with it."""
    levels, length = 1, 1
    while levels < most and coin.random() < GOES_ON:
        levels += 1
    while length <= levels and coin.random() < ALPHA:
        length += 1
    return CHAINS[levels - 1], length


def test_a_size_takes_the_time_of_the_sizes_at_which_its_drafts_end() -> None:
    """Worked example of `DraftLengths.seconds`: half go on after the first level, then all do."""
    sizes = [None, *chain_budgets(3)]
    lengths = DraftLengths(sizes, stops)
    for step in range(2000):
        lengths.add(CHAINS[2], CHAINS[2 * (step % 2)])
    found = lengths.seconds(np.array([1.0, 1.2, 1.3, 1.4]))
    assert found == pytest.approx([1.0, 1.2, 1.25, 1.3], abs=0.002)
    assert lengths.drafted(3)[3] == pytest.approx([1, 0.5, 0.5], abs=0.01)


def test_without_stops_a_size_takes_its_own_time() -> None:
    lengths = DraftLengths(SIZES)
    lengths.add(CHAINS[3], CHAINS[3])
    seconds = np.array([TOOK[size] for size in SIZES])
    assert (lengths.seconds(seconds) == seconds).all() and (lengths.drafted(4) == 1).all()


@pytest.mark.parametrize("most", [2, 4])
def test_expected_tokens_are_those_of_drafts_that_stop(most: int) -> None:
    """And acceptance by depth is that of tokens which were drafted: 0.8, 0.64, ..."""
    coin, found, wanted = random.Random(0), [], []
    expectations = Expectations(SIZES, CHANCES, stops)
    for step in range(6000):
        made, length = draft(coin, most)
        expectations.add(CHAINS[most - 1], made, [length])
        wanted.append(length)
        if step > 500 and step % 10 == 0:  # what is believed varies from step to step
            tracker = expectations.trackers[""]
            pairs = zip(tracker.observed[:most], tracker.expected[:most], strict=True)
            scales = [seen / hoped for seen, hoped in pairs]
            found.append(
                [expectations.tokens()[most], *np.multiply(scales, CHANCES[CHAINS[most - 1]])]
            )
    means = np.mean(found, axis=0)
    assert means[0] == pytest.approx(sum(wanted) / len(wanted), rel=0.02)
    assert means[1:] == pytest.approx([ALPHA**depth for depth in range(1, most + 1)], rel=0.06)


def test_steps_teach_what_the_size_takes_that_they_had() -> None:
    """Asked for chains of four, half of which end after each token; nothing is known before."""
    plan = AdaptivePlan(StepCosts(CHAINS), lambda outlook: CHANCES, stops)
    decoding, coin = PlannedDecoding(plan), random.Random(0)
    seconds, tokens = [], []
    for _ in range(12000):
        size = decoding.choose(NO_OUTLOOK)
        made, length = draft(coin, size.depth) if size else (None, 1)
        decoding.learn(made, [length], TOOK[made])
        if size == CHAINS[3]:
            seconds.append(TOOK[made])
            tokens.append(length)
    for chain in CHAINS[:3]:  # the last one is seldom whole
        assert plan.costs.seconds(chain) == pytest.approx(TOOK[chain], rel=0.05)
    assert len(seconds) > 100
    assert plan.seconds(CHAINS[3]) == pytest.approx(sum(seconds) / len(seconds), rel=0.05)
    assert plan.tokens(CHAINS[3]) == pytest.approx(sum(tokens) / len(tokens), rel=0.1)


def test_a_draft_is_told_what_the_time_of_a_level_would_bring_otherwise() -> None:
    """A level takes 0.3 of a plain step; steps of the best size bring so many tokens a second."""
    costs = StepCosts(CHAINS)
    costs.set_timed(TOOK)
    plan = AdaptivePlan(costs, lambda outlook: CHANCES, stops)
    size = PlannedDecoding(plan).choose(NO_OUTLOOK)
    assert size is not None
    whole = plan.priced(CHAINS[3], NO_OUTLOOK)
    rate = plan.rate(plan.best())
    assert rate == pytest.approx((1 + sum(CHANCES[plan.best()])) / TOOK[plan.best()])
    assert whole == replace(CHAINS[3], least_chance=0) and whole.least_chance > 0
    assert whole.least_chance == pytest.approx(LEVEL * rate)
    assert plan.priced(CHAINS[0], NO_OUTLOOK).least_chance == 0, "one level is always drafted"
    assert plan.priced(None, NO_OUTLOOK) is None
