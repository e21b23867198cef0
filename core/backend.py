"""The fence before all that compiles: what heads and engine know of it.

A `Backend` runs functions of tensors as they are. Those that compile them for a CPU, or record them
for a GPU, stand in `drafthead.backends`, which is imported by name and only where that is wanted.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch

from drafthead.core.dims import Spec
from drafthead.core.kv_cache.cache_memory import FRESH, FreshMemory

NOTHING: AbstractContextManager[object] = nullcontext()


def no_variant(*_: Any) -> Hashable:
    """For functions that differ by the sizes of their arguments alone."""
    return None


class Backend:
    """Runs functions of tensors, here as they are; see `drafthead.backends.backend`."""

    compiles = False  # whether functions are compiled, or recorded
    fuses = False  # whether parts of recorded functions are compiled
    kernels = ""  # names those of ours that take the place of operations, where any do
    memory: FreshMemory = FRESH  # for caches

    @property
    def has_kernels(self) -> bool:
        """Whether kernels of ours take the place of operations."""
        return bool(self.kernels)

    def forget(self) -> None:
        """Make compiled functions again, for the weights that they read have changed."""

    def forget_also(self, other: "Backend") -> None:
        """With this backend's functions forget those of another one, which read its weights too."""

    def within(self) -> AbstractContextManager[object]:
        """What functions run within that are not compiled."""
        return NOTHING

    @property
    def seconds(self) -> float:
        """Time spent on compiling so far."""
        return 0.0

    @property
    def longest(self) -> float:
        """Seconds of the graph that took longest so far."""
        return 0.0

    def compile(
        self,
        function: Callable[..., Any],
        dims: Mapping[str, Spec],
        reads: Sequence[Any],
        variant: Callable[..., Hashable] = no_variant,
        around: AbstractContextManager[object] = NOTHING,
    ) -> Callable[..., Any]:
        """The function as it is to be called: within `around`.

        `dims` declares the shapes of its arguments, see `Dims`. `reads` are the models and other
        values that it reads beside them. Calls differ in their code by `variant(*arguments)`.
        """

        def call(*arguments: Any) -> Any:
            with self.within(), around:
                return function(*arguments)

        return call

    def replacement_of(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """What functions call instead of `sampling.draw`, `largest` or `move_columns`."""
        return operation

    def packed(self, head: Any) -> Any:
        """A `DraftHead` as it is to be run: itself, or a twin of it that runs our kernels."""
        return head

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A part of a recorded function, compiled where that gains anything."""
        return function


EAGER = Backend()


def backend_for(device: torch.device, dtype: torch.dtype, fuses: bool = True) -> Backend:
    """A backend that compiles for a CPU, or records for a GPU, functions of models of this type.

    Without `fuses` recorded functions run as they are, so that first answers come soon.
    """
    made: Backend = import_module("drafthead.backends.backend").CompilingBackend(
        device, dtype, fuses
    )
    return made


def kernel_of(name: str) -> Callable[..., Any] | None:
    """Our kernel for a CPU of that name; None where there is none."""
    if not import_module("drafthead.backends.cpu.kernels.library").loaded():
        return None
    kernel: Callable[..., Any] = getattr(torch.ops.drafthead, name)
    return kernel


def packed_target(target: Any, in_int8: bool = False) -> Any:
    """The `Target` with our kernels in its passes, where there are any for it."""
    return import_module("drafthead.backends.cpu.packed_target").packed_target(target, in_int8)


def compiled_target(target: Any, in_int8: bool, fuses: bool) -> Any:
    """The `Target` compiled or recorded, see `drafthead.backends.compiled_target`."""
    return import_module("drafthead.backends.compiled_target").compiled_target(
        target, in_int8, fuses
    )
