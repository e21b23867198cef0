"""The interface to kernels for CPUs and to recordings for GPUs: a `Backend`.

It runs functions of tensors as they are. Others register themselves, and are imported only where
they are wanted.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from drafthead.core.kv_cache.column_cache import FRESH, FreshMemory
from drafthead.core.registry import Registry

NOTHING: AbstractContextManager[object] = nullcontext()


class Backend:
    """Runs functions of tensors, here as they are."""

    records = False  # whether functions are recorded, for a GPU
    fuses = False  # whether parts of recorded functions are compiled
    kernels = ""  # names those of ours that take the place of operations, where any do
    memory: FreshMemory = FRESH  # for caches

    @property
    def has_kernels(self) -> bool:
        """Whether kernels of ours take the place of operations."""
        return bool(self.kernels)

    def forget(self) -> None:
        """Record functions again, for the weights that they read have changed."""

    def another(self) -> "Backend":
        """A backend for a drafter of these passes, which forgets its functions with this one."""
        return self

    def within(self) -> AbstractContextManager[object]:
        """The context of functions that are not recorded."""
        return NOTHING

    @property
    def longest(self) -> float:
        """Seconds of the recording that took longest so far, with what was compiled for it."""
        return 0.0

    def record(
        self,
        function: Callable[..., Any],
        around: AbstractContextManager[object] = NOTHING,
        held: Collection[int] = (),
    ) -> Callable[..., Any]:
        """The function as it is to be called: within `around`.

        `held` are the places of arguments, tensors or lists of them, that keep their address.
        """

        def call(*arguments: Any) -> Any:
            with self.within(), around:
                return function(*arguments)

        return call

    def replacement_of(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """The function to call instead of one of core or heads, such as `sampling.largest`."""
        return operation

    def packed(self, head: Any) -> Any:
        """A `DraftHead` as it is to be run: itself, or a twin of it that runs our kernels."""
        return head

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A part of a recorded function, compiled where that gains anything."""
        return function


EAGER = Backend()
# What kernels and recordings provide: `kernel`, for `kernel_of`, and the targets whose passes run
# them, `packed` and `recorded`.
BACKENDS: Registry[Callable[..., Any]] = Registry("drafthead.backends")


def kernel_of(name: str) -> Callable[..., Any] | None:
    """Our kernel for a CPU of that name; None where there is none."""
    kernel: Callable[..., Any] | None = BACKENDS["kernel"](name)
    return kernel
