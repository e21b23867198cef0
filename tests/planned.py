"""What a planner asks for, without a drafter."""

from typing import NamedTuple

import torch

from drafthead.core.trees.guesses import Guesses, GuessTree
from drafthead.core.trees.tree import Budget
from drafthead.infer.planning.draft_acceptance import Size
from drafthead.infer.planning.planner import Planner

NOTHING = GuessTree([], [], [], [])


class Whole(NamedTuple):
    """A proposal of so many nodes and levels."""

    num_nodes: int
    max_depth: int


def size_of(planner: Planner, free: GuessTree = NOTHING) -> Size:
    """The size of the next step's draft, where lookup has found something or not."""

    def propose(budget: Budget) -> Whole | Guesses:
        if budget.levels:
            return Whole(budget.nodes, budget.depth)
        return Guesses([0], [free.best(budget.nodes - 1)], torch.device("cpu"))

    planner.draft(propose)
    return planner.made[0][0]
