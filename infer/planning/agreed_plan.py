"""One plan for all processes that share a target: its first process decides for the others.

A planner reads a clock, and processes that draft trees of other sizes would wait for each other for
ever. So the first one sends what it asks its drafter for, and what of it is verified.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch.distributed as dist

from drafthead.core.sampling import RowSampling
from drafthead.core.trees.guesses import Guesses, Proposal
from drafthead.core.trees.tree import Budget
from drafthead.infer.planning.planner import EVERYTHING, Mix, Planner, Propose


class Kept(NamedTuple):
    """Ends the messages of a step: nodes of the last draft that are verified, None: none."""

    nodes: int | None


@cache
def group_of_hosts() -> dist.ProcessGroup | None:
    """The group that decisions are sent through: never the GPUs, which have other things to do."""
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

        def sent_first(budget: Budget) -> Proposal:
            """The drafter's proposal, which may need all processes: an embedding may be shared."""
            self._sent(budget)
            return propose(budget)

        proposal = self.own.draft(sent_first)
        self._sent(Kept(None if proposal is None else proposal.num_nodes))
        return proposal

    def _followed(self, propose: Propose) -> Proposal | None:
        """The proposal that the first process verifies, of those that it asks for."""
        last: Proposal | None = None
        while isinstance(message := self._sent(None), Budget):
            last = propose(message)
        if last is None or message.nodes is None:
            return None
        # Free drafts are found on the host, larger than what is verified of them.
        return last.best(message.nodes) if isinstance(last, Guesses) else last

    def _sent(self, message: Budget | Kept | None) -> Budget | Kept:
        """The first process's message, in all of them."""
        messages: list[Budget | Kept | None] = [message]
        dist.broadcast_object_list(messages, src=0, group=self.group)
        assert messages[0] is not None
        return messages[0]

    def learn(self, accept_lengths: Sequence[int], seconds: float) -> None:
        """Only who decides needs to know."""
        if self.decides:
            self.own.learn(accept_lengths, seconds)

    def meet(self, rows: int, columns: int, sampling: RowSampling, mix: Mix = EVERYTHING) -> None:
        if self.decides:
            self.own.meet(rows, columns, sampling, mix)

    def finish(self) -> None:
        if self.decides:
            self.own.finish()
