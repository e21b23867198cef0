"""Timing on purpose, against simulated steps of known seconds."""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
from planned import Whole

from drafthead.core.trees.tree import Budget
from drafthead.heads.growing.static import tree_budgets
from drafthead.infer.planning.draft_acceptance import Size
from drafthead.infer.planning.step_costs import StepCosts
from drafthead.infer.timing.step_timing import ROUNDS, VISIT_STEPS, Visits, time_sizes


def bringing(tokens: float, nodes: int, depth: int) -> Budget:
    """A size that is expected to bring so many tokens a step."""
    return Budget(nodes, depth, chances=(tokens - 1,))


def timed(
    sizes: list[Budget], took: Callable[[Size, int], float]
) -> tuple[StepCosts, Counter[Size]]:
    """Costs, and visits to each size; `took(size, step)` returns the seconds of a numbered step."""
    costs, steps, visited = StepCosts(sizes), count(), Counter[Size]()

    def run(visits: Visits) -> None:
        visited[visits.sizes[VISIT_STEPS]] += 1
        for size in visits.sizes:
            visits.draft(lambda budget: Whole(budget.nodes, budget.depth))
            visits.learn([1], took(size, next(steps)))

    time_sizes(costs, run)
    return costs, visited


@pytest.mark.parametrize(
    ("small", "large", "seconds", "visits"),
    [
        # 1.5 tokens in 1.2 times a plain step's time, and 1.9 in twice that time.
        ((1.5, 3, 2), (1.9, 64, 2), (0.01, 0.012, 0.02), (ROUNDS, 1)),
        # No size comes near to plain decoding: the best is timed all the same.
        ((1.2, 2, 1), (1.4, 8, 2), (0.01, 0.02, 0.03), (ROUNDS, 1)),
        # Slow models are timed for as long as there is time for.
        ((1.2, 2, 1), (1.4, 4, 2), (0.6, 0.66, 0.75), (1, 1)),
        # Steps are so slow that only sizes are timed that may win; of 64 nodes that is known.
        ((2.0, 4, 2), (2.1, 64, 2), (0.6, 3.0, 9.0), (1, 0)),
        ((1.5, 4, 2), (9.0, 64, 2), (3.0, 3.0, 3.0), (1, 1)),
    ],
)
def test_sizes_that_could_still_win_are_timed_for_longest(small, large, seconds, visits) -> None:
    sizes = [bringing(*small), bringing(*large)]
    known = dict(zip((None, *sizes), seconds, strict=True))
    costs, visited = timed(sizes, lambda size, step: known[size])
    assert (visited[sizes[0]], visited[sizes[1]]) == visits
    for size in (None, *visited):
        assert costs.seconds(size) == pytest.approx(known[size])


def test_a_machine_that_changes_its_speed_is_timed_as_one_that_does_not() -> None:
    """It is half as slow again at times, and three steps in a hundred take far longer."""
    coin = random.Random(0)
    ratios = {size: 1 + 0.07 * size.nodes if size else 1.0 for size in (None, *tree_budgets(3))}
    # So that all remain contenders.
    sizes = [replace(size, chances=(took - 1,)) for size, took in ratios.items() if size]

    def took(size: Size, step: int) -> float:
        drift = 1.25 + 0.25 * math.sin(step / 100)
        return 0.002 * ratios[size] * drift * (5 if coin.random() < 0.03 else 1)

    costs, _ = timed(sizes, took)
    for size, ratio in ratios.items():
        assert costs.seconds(size) / costs.seconds(None) == pytest.approx(ratio, rel=0.05)
