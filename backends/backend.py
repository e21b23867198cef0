"""What compiles functions for a CPU and records them for a GPU, as `core/backend.py` asks."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch

from drafthead.backends.compiled import Compiled
from drafthead.backends.cuda.compiled_layers import Fused
from drafthead.core.backend import NOTHING, Backend, no_variant
from drafthead.core.dims import Spec
from drafthead.core.kv_cache.cache_memory import CacheMemory
from drafthead.core.sampling import draw

KEPT_DRAWS = "drafthead.backends.cuda.kept_draws"


class CompilingBackend(Backend):
    """Compiles what it is given, for one device and one type of weights."""

    compiles = True

    def __init__(self, device: torch.device, dtype: torch.dtype, fuses: bool):
        """See `heads.backend.backend_for`."""
        self.device, self.dtype = device, dtype
        self.fuses = fuses and device.type == "cuda"
        self.memory = CacheMemory.on(device)
        self.made: list[Compiled] = []
        self.others: WeakSet[Backend] = WeakSet()  # of drafters, which are forgotten with this one

    def compile(
        self,
        function: Callable[..., Any],
        dims: Mapping[str, Spec],
        reads: Sequence[Any],
        variant: Callable[..., Hashable] = no_variant,
        around: AbstractContextManager[object] = NOTHING,
    ) -> Compiled:
        made_for = self.device, self.dtype
        made = Compiled(function, *made_for, dims, variant, around, reads)
        self.made.append(made)
        return made

    def replacement_of(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        if self.device.type == "cuda" and operation is draw:
            with suppress(ImportError):  # without Triton filters sort
                found: Callable[..., Any] = import_module(KEPT_DRAWS).draw
                return found
        return operation

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self.fuses:
            return function
        with suppress(ImportError):  # without Triton there is nothing to compile with
            import_module("drafthead.backends.cuda.largest")  # makes the operation known
        return Fused(function)

    @property
    def seconds(self) -> float:
        # A list of them: another thread may add one meanwhile.
        return sum(made.seconds for made in list(self.made))

    @property
    def longest(self) -> float:
        return max((made.longest for made in list(self.made)), default=0.0)

    def forget(self) -> None:
        """Make all graphs again when they are needed: the weights that they hold have changed."""
        for made in list(self.made):
            if made.reads:
                made.forget()
        for other in list(self.others):
            other.forget()

    def forget_also(self, other: Backend) -> None:
        self.others.add(other)
