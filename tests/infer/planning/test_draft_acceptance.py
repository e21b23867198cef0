"""Drafts that may stop early: the planner learns how far they go apart from how right they are."""

import random
from dataclasses import replace

import numpy as np
import pytest
from planned import Whole

from drafthead.core.trees.tree import Budget
from drafthead.heads.growing.static import chain_budgets, tree_budgets
from drafthead.infer.planning.draft_acceptance import DraftAcceptance, Size
from drafthead.infer.planning.planner import AdaptivePlan, PlannedDecoding
from drafthead.infer.planning.step_costs import StepCosts

CHAINS = chain_budgets(4)  # whose tokens are each right in 0.6 of the cases, as is assumed
SIZES: list[Size] = [None, *CHAINS]
ALPHA, GOES_ON, LEVEL = 0.8, 0.5, 0.3
TOOK = {None: 1.0} | {chain: 1 + LEVEL * chain.depth for chain in CHAINS}


def draft(coin: random.Random, most: int) -> tuple[Budget, int]:
    """A chain that goes on after every other token, and the tokens that a step commits with it."""
    levels, length = 1, 1
    while levels < most and coin.random() < GOES_ON:
        levels += 1
    while length <= levels and coin.random() < ALPHA:
        length += 1
    return CHAINS[levels - 1], length


def test_a_size_takes_the_time_of_the_sizes_at_which_its_drafts_end() -> None:
    """The example of `DraftAcceptance.seconds`: half go on after the first level, then all do."""
    acceptance = DraftAcceptance([None, *CHAINS[:3]])
    for step in range(2000):
        acceptance.add(CHAINS[2], CHAINS[2 * (step % 2)], [4])
    found = acceptance.seconds(np.array([1.0, 1.2, 1.3, 1.4]))
    assert found == pytest.approx([1.0, 1.2, 1.25, 1.3], abs=0.002)
    assert acceptance.reached()[3] == pytest.approx([1, 0.5, 0.5], abs=0.02)


def test_sizes_of_other_forms_take_their_own_time() -> None:
    """Trees of a head have no levels of one width."""
    sizes = tree_budgets(3)
    acceptance = DraftAcceptance([None, *sizes])
    assert all(acceptance.stops(size) == [size] for size in sizes)
    seconds = np.arange(1.0, len(sizes) + 2)
    assert (acceptance.seconds(seconds) == seconds).all()


@pytest.mark.parametrize("most", [2, 4])
def test_expected_tokens_are_those_of_drafts_that_stop(most: int) -> None:
    """And acceptance by depth is that of tokens which were drafted: 0.8, 0.64, ..."""
    coin, found, wanted = random.Random(0), [], []
    acceptance = DraftAcceptance(SIZES)
    for step in range(6000):
        made, length = draft(coin, most)
        acceptance.add(CHAINS[most - 1], made, [length])
        wanted.append(length)
        if step > 500 and step % 10 == 0:  # what is believed varies from step to step
            scales = acceptance.observed[0, :most] / acceptance.expected[0, :most]
            found.append([acceptance.tokens()[most], *scales * CHAINS[most - 1].chances])
    means = np.mean(found, axis=0)
    assert means[0] == pytest.approx(sum(wanted) / len(wanted), rel=0.02)
    assert means[1:] == pytest.approx([ALPHA**depth for depth in range(1, most + 1)], rel=0.06)


def test_steps_teach_what_the_size_takes_that_they_had() -> None:
    """Asked for chains of four, half of which end after each token; nothing is known before."""
    plan = AdaptivePlan(StepCosts(CHAINS))
    decoding, coin = PlannedDecoding(plan), random.Random(0)
    seconds, tokens = [], []
    for _ in range(12000):
        drafted: list[Size] = []
        lengths = [1]

        def propose(budget: Budget, drafted: list[Size] = drafted, lengths=lengths) -> Whole:
            made, lengths[0] = draft(coin, budget.depth)
            drafted += [made, budget]
            return Whole(made.nodes, made.depth)

        decoding.draft(propose)
        made, size = drafted or (None, None)
        decoding.learn(lengths, TOOK[made])
        if size == CHAINS[3]:
            seconds.append(TOOK[made])
            tokens.append(lengths[0])
    for chain in CHAINS[:3]:  # the last one is seldom whole
        assert plan.costs.seconds(chain) == pytest.approx(TOOK[chain], rel=0.05)
    assert len(seconds) > 100
    assert plan.seconds(CHAINS[3]) == pytest.approx(sum(seconds) / len(seconds), rel=0.05)
    assert plan.tokens(CHAINS[3]) == pytest.approx(sum(tokens) / len(tokens), rel=0.1)


def test_a_draft_is_told_what_the_time_of_a_level_would_bring_otherwise() -> None:
    """A level takes 0.3 of a plain step; steps of the best size bring so many tokens a second."""
    costs = StepCosts(CHAINS)
    costs.set_timed(TOOK)
    plan = AdaptivePlan(costs)
    whole = plan.priced(CHAINS[3])
    rate = plan.rate(plan.best())
    assert rate == pytest.approx((1 + sum(plan.best().chances)) / TOOK[plan.best()])
    assert whole == replace(CHAINS[3], least_chance=0) and whole.least_chance > 0
    assert whole.least_chance == pytest.approx(LEVEL * rate)
    assert plan.priced(CHAINS[0]).least_chance == 0, "one level is always drafted"
    assert plan.priced(None) is None
