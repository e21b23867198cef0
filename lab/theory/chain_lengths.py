"""Which length of chain would have been right: one for all steps, the planner's, or an oracle's.

Nothing is decoded. The steps of given answers are made again from two tables: how much of a long
chain is accepted at each place (`accepted_runs`), and what a step with each length costs. A chain
of K tokens is taken to be the beginning of the longer one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from drafthead.heads.trees.static import chain_budgets
from drafthead.infer.engine.planner import (
    AdaptivePlan,
    Chances,
    FixedPlan,
    PlannedDecoding,
    Planner,
)
from drafthead.infer.engine.step_costs import StepCosts
from drafthead.lab.theory.given_answers import Run

StepCost = Callable[[int], float]  # plain steps that a step with a chain of so many tokens takes


@dataclass(frozen=True)
class LengthChoices:
    """Speedups over plain decoding on the same answers, by how the length of chains is chosen."""

    fixed: list[float]  # with K tokens in every step; K = 0 is plain decoding
    adaptive: float  # the planner chooses K by the costs and the acceptance that it meets
    oracle: float  # K is known to be right at every step: no choice of lengths is faster
    oracle_length: float  # its mean K

    @property
    def best_fixed(self) -> int:
        """The K that is best in every step."""
        return self.fixed.index(max(self.fixed))


def compare_choices(
    answers: Sequence[Sequence[Run]], longest: int, cost: StepCost, chances: Chances
) -> LengthChoices:
    """Make the steps of answers again with each way of choosing lengths from 0 to `longest`.

    `chances` are what the planner believes at first.
    """
    tokens = sum(map(len, answers))
    budgets = chain_budgets(longest)
    plan = AdaptivePlan(StepCosts(budgets), chances)
    fixed = [steps_again(answers, cost, partial(FixedPlan, size)) for size in (None, *budgets)]
    adaptive = steps_again(answers, cost, partial(PlannedDecoding, plan))
    best = [oracle([run.accepted for run in runs], cost) for runs in answers]
    lengths = [length for _, chosen in best for length in chosen]
    return LengthChoices(
        [tokens / taken for taken in fixed],
        tokens / adaptive,
        tokens / sum(taken for taken, _ in best),
        sum(lengths) / len(lengths),
    )


def steps_again(
    answers: Sequence[Sequence[Run]], cost: StepCost, planner_for: Callable[[], Planner]
) -> float:
    """What decoding the answers one after the other takes, each with a planner of its own."""
    total = 0.0
    for runs in answers:
        planner, place = planner_for(), 0
        while place < len(runs):
            run = runs[place]
            budget = planner.choose(run.outlook)
            drafted = min(budget.depth, run.drafted) if budget else 0
            committed = min(drafted, run.accepted) + 1
            planner.learn(budget, [committed], cost(drafted))
            total += cost(drafted)
            place += committed
        planner.finish()
    return total


def oracle(accepted: Sequence[int], cost: StepCost) -> tuple[float, list[int]]:
    """The least that an answer can cost, and the length of each step's chain.

    `accepted` is how much of a long chain is accepted at each place. Where a drafted token is
    cheaper than a plain step, and verifying is free, each step drafts just what is accepted (the
    oracle of Leviathan et al., section 3.5): with 2 1 0 1 0 those are chains of 2 and 1. Otherwise
    it drafts less, down to nothing.
    """
    end = len(accepted)
    least, chosen = [0.0] * (end + 1), [0] * end
    for place in range(end - 1, -1, -1):
        least[place], chosen[place] = min(
            (cost(length) + least[min(place + length + 1, end)], length)
            for length in range(accepted[place] + 1)
        )
    lengths, place = [], 0
    while place < end:
        lengths.append(chosen[place])
        place += chosen[place] + 1
    return least[0], lengths
