"""The backend that records functions for a GPU and compiles parts of them."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from functools import wraps
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch

from drafthead.backends.cuda.compiled import Compiled, keep_compiled_code
from drafthead.backends.cuda.recorded import Recorded
from drafthead.core.backend import NOTHING, Backend
from drafthead.core.kv_cache.cache_memory import CacheMemory
from drafthead.core.sampling import draw

KEPT_DRAWS = "drafthead.backends.cuda.kept_draws"


class RecordingBackend(Backend):
    """Records what it is given, for one device."""

    records = True

    def __init__(self, device: torch.device, fuses: bool):
        """Without `fuses` recorded functions run as they are, so that first answers come soon."""
        self.device = device
        self.fuses = fuses and device.type == "cuda"
        if self.fuses:
            keep_compiled_code()
        self.memory = CacheMemory.on(device)
        self.made: list[Recorded] = []
        self.others: WeakSet[RecordingBackend] = WeakSet()  # of drafters, forgotten with this one

    def record(
        self,
        function: Callable[..., Any],
        around: AbstractContextManager[object] = NOTHING,
        held: Collection[int] = (),
    ) -> Recorded:
        @wraps(function)
        def within(*arguments: Any) -> Any:
            with around:
                return function(*arguments)

        self.made.append(Recorded(within, held))
        return self.made[-1]

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
        return Compiled(function)

    @property
    def longest(self) -> float:
        # A list of them: another thread may add one meanwhile.
        return max((made.longest for made in list(self.made)), default=0.0)

    def forget(self) -> None:
        for made in list(self.made):
            made.forget()
        for other in list(self.others):
            other.forget()

    def another(self) -> "RecordingBackend":
        other = RecordingBackend(self.device, self.fuses)
        self.others.add(other)
        return other
