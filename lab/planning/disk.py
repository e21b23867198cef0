"""What a run writes to the disk: saved states, the head, and kept features."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from drafthead.lab.planning.dry_setup import DrySetup
from drafthead.lab.planning.step_memory import StepMemory
from drafthead.train.draft_models.student import Student
from drafthead.train.features.kept import feature_bytes
from drafthead.train.run.saved_states import KEPT_STATES


@dataclass(frozen=True)
class DiskUse:
    """Bytes, without the headers of the files: less than 1 kB for each tensor."""

    state: int  # one saved state
    head: int
    features: int  # that are kept after the first epoch; 0 without a folder
    feature_rows: int  # of which they are

    @property
    def states(self) -> int:
        """The states of a run at most: those that are kept, and one that is being written."""
        return (KEPT_STATES + 1) * self.state

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.head + self.features


def disk_use(setup: DrySetup, memory: StepMemory) -> DiskUse:
    """What the run of a dry setup will write."""
    state = bytes_of(setup.head.state_dict().values())
    for optimizer in memory.optimizers:
        state += bytes_of(tensors_in(optimizer.state))
    if memory.average is not None:
        state += bytes_of(memory.average.state_dict().values())
    dtype = torch.bfloat16 if isinstance(setup.head, Student) else setup.target.dtype
    head = bytes_of(setup.head.state_dict().values(), dtype)
    rows, features = kept_features(setup)
    return DiskUse(state, head, features, rows)


def kept_features(setup: DrySetup) -> tuple[int, int]:
    """How many rows' features are kept, and their bytes."""
    data, target, spec = setup.config.data, setup.target, setup.head.features_needed
    if data.feature_folder is None or setup.rows is None:
        return 0, 0
    size = feature_bytes(spec, target.hidden_size, target.dtype, data.feature_dtype == "int8")
    lengths = [setup.rows.row_length(row) for row in range(len(setup.rows.rows))]
    budget = 1e9 * (data.feature_budget_gb or float("inf"))
    totals = [total for total in accumulate(size * n for n in lengths) if total <= budget]
    return len(totals), totals[-1] if totals else 0


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """All tensors of an optimiser's state."""
    for values in state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def bytes_of(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> int:
    """The bytes of tensors [...], each storage once; `dtype` is the type that numbers get."""
    unique = {tensor.untyped_storage(): tensor for tensor in tensors}.values()
    return sum(
        tensor.numel() * (dtype if dtype and tensor.is_floating_point() else tensor.dtype).itemsize
        for tensor in unique
    )
