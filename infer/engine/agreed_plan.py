"""One plan for all processes that share a target: its first process decides for the others.

A planner reads a clock, and processes that draft trees of other sizes would wait for each other for
ever. So the first one tells what it asked its drafter for, and what of it is verified.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch.distributed as dist

from drafthead.heads.errors import UserError
from drafthead.heads.trees.guesses import Guesses
from drafthead.heads.trees.recipe import Proposal
from drafthead.heads.trees.tree import Budget
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.planner import FixedPlan, Planner, Propose


class Kept(NamedTuple):
    """The end of what is told of a step: nodes of the last draft that are verified, None: none."""

    nodes: int | None


@cache
def group_of_hosts() -> dist.ProcessGroup | None:
    """What decisions are told through: never the GPUs, which have other things to do."""
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


class AgreedPlan(Planner):
    """A planner whose decisions are those of the first process."""

    def __init__(self, own: Planner):
        """`own` decides in the first process alone. All processes make theirs together."""
        self.own, self.decides = own, dist.get_rank() == 0
        self.group = group_of_hosts()

    def draft(self, propose: Propose, ahead: bool = False) -> Proposal | None:
        """The first process's draft, made by each process for itself."""
        if not self.decides:
            return self._followed(propose)

        def told_first(budget: Budget) -> Proposal:
            """The drafter's proposal, which may need all processes: an embedding may be shared."""
            self._told(budget)
            return propose(budget)

        proposal = self.own.draft(told_first)
        self._told(Kept(None if proposal is None else proposal.num_nodes))
        return proposal

    def _followed(self, propose: Propose) -> Proposal | None:
        """What the first process verifies, of what it asks for."""
        last: Proposal | None = None
        while isinstance(told := self._told(None), Budget):
            last = propose(told)
        if last is None or told.nodes is None:
            return None
        # Free drafts are found on the host, larger than what is verified of them.
        return last.best(told.nodes) if isinstance(last, Guesses) else last

    def _told(self, what: Budget | Kept | None) -> Budget | Kept:
        """What the first process tells, in all of them."""
        told: list[Budget | Kept | None] = [what]
        dist.broadcast_object_list(told, src=0, group=self.group)
        assert told[0] is not None
        return told[0]

    def learn(self, accept_lengths: Sequence[int], seconds: float) -> None:
        """Only who decides needs to know."""
        if self.decides:
            self.own.learn(accept_lengths, seconds)

    def finish(self) -> None:
        """Likewise."""
        if self.decides:
            self.own.finish()


def agreed(planner: Planner, run: BatchRun) -> Planner:
    """The planner for a run of a target that several processes share.

    Raises UserError for an answer that is to end by the clock, which each process has for itself.
    """
    if run.request.max_seconds is not None:
        raise UserError("max_time does not go with a target that several processes share")
    return planner if isinstance(planner, FixedPlan) else AgreedPlan(planner)
