"""Timing on purpose, against simulated steps of known seconds."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count

import pytest

from drafthead.heads.drafting.drafter import NO_OUTLOOK
from drafthead.heads.trees.static import tree_budgets
from drafthead.heads.trees.tree import Budget
from drafthead.infer.timing.step_timing import (
    Round,
    TimingSettings,
    Visit,
    monotone,
    seconds_by_budget,
    time_in_rounds,
)

BUDGETS = tree_budgets(3)
TIMING = TimingSettings()


def timed_visits(
    tokens: Mapping[Budget, float], took: Callable[[Budget | None, int], float]
) -> list[Visit]:
    """Visits to simulated steps; `took(budget, step)` returns the seconds of the numbered step."""
    steps = count()

    def run_round(this_round: Round) -> None:
        for _ in range(this_round.steps):
            budget = this_round.choose(NO_OUTLOOK)
            this_round.learn(budget, [1], took(budget, next(steps)))

    return time_in_rounds(tokens, run_round, TIMING)


def test_sizes_that_promise_much_less_than_the_best_are_timed_at_one_visit_only() -> None:
    """1.5 tokens in 1.2 times a plain step's time, and 1.9 in twice that time."""
    small, large = Budget(3, 2), Budget(64, 2)
    seconds = {None: 0.01, small: 0.012, large: 0.02}
    visits = timed_visits({small: 1.5, large: 1.9}, lambda budget, step: seconds[budget])
    visited = Counter(visit.budget for visit in visits)
    assert visited == {None: TIMING.rounds + 1, small: TIMING.rounds, large: 1}
    assert seconds_by_budget(visits) == pytest.approx(seconds)


def test_where_no_size_comes_near_to_plain_decoding_the_best_is_timed_all_the_same() -> None:
    small, large = Budget(2, 1), Budget(8, 2)
    seconds = {None: 0.01, small: 0.02, large: 0.03}
    visits = timed_visits({small: 1.2, large: 1.4}, lambda budget, step: seconds[budget])
    assert Counter(visit.budget for visit in visits)[small] == TIMING.rounds


def test_trees_that_cannot_win_are_passed_over_where_steps_are_slow() -> None:
    """The larger trees bring too little even in the time of 4 nodes, which was enough to time."""
    small, large, other = Budget(4, 2), Budget(64, 2), Budget(64, 2, source="lookup")
    took = {None: TIMING.enough_seconds / 10, small: TIMING.enough_seconds / 2}
    tokens = {large: 3.0, small: 2.0, other: 1.2}
    visits = timed_visits(tokens, lambda budget, step: took.get(budget, 0.1))
    assert Counter(visit.budget for visit in visits) == {None: 2, small: 1, other: 1}


def test_trees_that_may_win_are_timed_however_slow_steps_are() -> None:
    small, large = Budget(4, 2), Budget(64, 2)
    plain = TIMING.enough_seconds / 2
    visits = timed_visits({small: 1.5, large: 1.9}, lambda budget, step: plain)
    assert Counter(visit.budget for visit in visits) == {None: 2, small: 1, large: 1}


def test_slow_models_are_timed_for_as_many_rounds_as_there_is_time_for() -> None:
    small, large = Budget(2, 1), Budget(4, 2)
    seconds = {
        None: TIMING.enough_seconds / 10,
        small: TIMING.enough_seconds / 9,
        large: TIMING.enough_seconds / 8,
    }
    visits = timed_visits({small: 1.2, large: 1.4}, lambda budget, step: seconds[budget])
    assert Counter(visit.budget for visit in visits) == {None: 2, small: 1, large: 1}
    assert seconds_by_budget(visits) == pytest.approx(seconds)


def test_a_machine_that_changes_its_speed_is_timed_as_one_that_does_not() -> None:
    """It is half as slow again at times, and three steps in a hundred take far longer."""
    coin = random.Random(0)
    ratios = {None: 1.0} | {budget: 1 + 0.07 * budget.nodes for budget in BUDGETS}

    def took(budget: Budget | None, step: int) -> float:
        drift = 1.25 + 0.25 * math.sin(step / 100)
        return 0.002 * ratios[budget] * drift * (5 if coin.random() < 0.03 else 1)

    tokens = {budget: ratios[budget] for budget in BUDGETS}  # so that all remain contenders
    found = seconds_by_budget(timed_visits(tokens, took))
    for budget, ratio in ratios.items():
        assert found[budget] / found[None] == pytest.approx(ratio, rel=0.03)


def test_small_trees_and_large_ones_correct_each_other() -> None:
    """Nodes and depth both count: 3 nodes in a chain may well be slower than 8 side by side."""
    two, three, four = Budget(2, 1), Budget(3, 1), Budget(4, 1)
    assert monotone({two: 1.3, three: 1.2, four: 1.4}) == {two: 1.25, three: 1.25, four: 1.4}
    assert monotone({Budget(3, 2): 1.5, Budget(8, 1): 1.3}) == {
        Budget(3, 2): 1.5,
        Budget(8, 1): 1.3,
    }
    assert monotone({two: 0.9}) == {two: 1}
