"""Functions of tensors under `torch.compile`, of which recorded passes are made where one asks."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.fx.experimental._config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.exc import InductorError
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from drafthead.backends.cuda import MOST_LARGEST
from drafthead.core.errors import UserError, first_line
from drafthead.core.storage.disk_cache import reason_against, usable_cache_folder
from drafthead.core.substitution import Substituting, Substitution

# One or several rows, one or several nodes, by masks and windows of layers.
MOST_VARIANTS = 64
LONG = 1024  # numbers of a row, of which our kernel finds the largest; fewer are sorted as quickly
# Why a function stays uncompiled: torch's ways, or our reading of these.
UNCOMPILED = TorchDynamoException, FailOnRecompileLimitHit, InductorError, AttributeError

logger = logging.getLogger(__name__)


def has_kernel(x: torch.Tensor, k: int, dim: int = -1) -> bool:
    """Whether there is a kernel for the k largest of x [..., V]; rows that are short need none."""
    return x.device.type == "cuda" and dim == -1 and k <= MOST_LARGEST < LONG < x.shape[-1]


def largest(x: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of x [..., V] and their places, both [..., k], by our kernel."""
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.drafthead.largest(x, k)
    return found


LARGEST = Substituting([Substitution(torch.Tensor.topk, largest, has_kernel)])


class Compiled:
    """A function of tensors under `torch.compile`, for recordings; as it is where that fails."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any] | None = None):
        """`options` are those of torch's code generator."""
        self.function = self.__wrapped__ = function  # which has the signature

        def with_kernels(*arguments: Any) -> Any:
            """The function, with our kernel in place of torch's."""
            with LARGEST:
                return function(*arguments)

        own = with_own_code(with_kernels)
        self.code = torch.compile(own, fullgraph=True, dynamic=True, options=options or {})

    def __call__(self, *arguments: Any) -> Any:
        """The function's value."""
        try:
            with small_graphs():
                return self.code(*arguments)
        except UNCOMPILED as error:
            line = first_line(error)
            logger.warning("%s is not compiled: %s", self.function, line)
            self.code = self.function
            return self.function(*arguments)


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a code object of its own.

    torch keeps graphs by code object and would otherwise offer those of one model to another.
    """

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


@contextmanager
def small_graphs() -> Iterator[None]:
    """Within, sizes change freely within a graph, and there may be one for each kind of pass."""
    # Sizes that happen to be equal now, such as positions and nodes, need not stay so.
    duck = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS), duck:
        yield


def keep_compiled_code() -> None:
    """Let compiled code outlive the process and the machine's next start, unless the user has
    chosen a place for it, or nothing can be written there.

    Raises UserError where nothing can be written in the place that the user has chosen.
    """
    place = "TORCHINDUCTOR_CACHE_DIR"
    chosen = os.environ.get(place)
    # Importing torch's tracer writes a temporary folder into the environment: that is no choice.
    if chosen in (None, str(Path(default_cache_dir()).absolute())):
        folder = usable_cache_folder("compiled")
        if folder is not None:
            os.environ[place] = str(folder)
    elif reason := reason_against(Path(chosen)):
        raise UserError(
            f"{place} is {chosen}, where compiled code cannot be written ({reason}): set it to a "
            "folder of yours, or unset it"
        )
