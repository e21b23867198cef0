"""A clock for the planner on which it does not depend how fast the machine is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.target.target import Target
from drafthead.infer.planning.planner import PlannedDecoding
from drafthead.infer.scheduling import running_rows
from drafthead.infer.timing import plans


@contextmanager
def steady_clock(folder: Path) -> Iterator[None]:
    """Steps of all sizes seem to take a second; what is learnt so is kept in a folder of its own.

    So drafts pay wherever they are accepted.
    """
    learn, costs_file = PlannedDecoding.learn, plans.costs_file

    def learn_steadily(self: PlannedDecoding, accept_lengths: Sequence[int], _: float) -> None:
        learn(self, accept_lengths, 1.0)

    def own_file(target: Target, drafter: Drafter) -> Path:
        return folder / costs_file(target, drafter).name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedDecoding, "learn", learn_steadily)
        patch.setattr(plans, "costs_file", own_file)
        # Each turn takes a second, too: which batch goes on does not depend on the machine.
        patch.setattr(running_rows, "perf_counter", count().__next__)
        yield
