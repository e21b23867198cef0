"""Compiling what runs once a step: `torch.compile` with the settings that decoding needs.

On a CPU the weights are frozen into the graph and laid out for the processor once; eagerly they are
laid out anew at every call, which at one row costs more than the multiplication. Calls go through
C++, as a step is many short calls. On a GPU the passes are recorded as CUDA graphs.
"""

import os
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from drafthead.heads.errors import UserError

CPU_OPTIONS = {"freezing": True, "cpp_wrapper": True, "cpp.enable_concat_linear": True}
# A process may compile several models and kinds of shape through the same code. Beyond its own,
# smaller number of graphs torch would refuse.
MOST_GRAPHS = 256


class Compiled:
    """A function of tensors under `torch.compile`, with an account of what compiling took.

    Dimensions named in `dynamic` may change from call to call without another graph, except that
    size 1 is a graph of its own, because the code for it differs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        device: torch.device,
        kind: Callable[..., Hashable],
        dynamic: Callable[..., Sequence[tuple[torch.Tensor, int]]],
    ):
        """`kind(*arguments)` says which graph a call needs, and `dynamic(*arguments)` lists the
        dimensions of tensors that change within a kind.
        """
        keep_compiled_code()
        torch._dynamo.config.recompile_limit = MOST_GRAPHS
        self.kind, self.dynamic = kind, dynamic
        on_cpu = device.type == "cpu"
        self.options = dict(CPU_OPTIONS) if on_cpu else {}
        self.compiled = torch.compile(
            function,
            fullgraph=True,
            mode=None if on_cpu else "reduce-overhead",
            options=self.options or None,
        )
        self.kinds: set[Hashable] = set()  # that have a graph
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        """The function's value; raises UserError for code that cannot be compiled."""
        kind = self.kind(*arguments)
        if kind in self.kinds:
            return self.compiled(*arguments)
        for tensor, dim in self.dynamic(*arguments):
            if tensor.shape[dim] != 1:
                torch._dynamo.mark_dynamic(tensor, dim)
        started = time.perf_counter()
        try:
            # Tracing too must know that weights will be frozen: it then takes them for constants and
            # guards them, so that another model of the same shape never runs on these weights.
            with torch._inductor.config.patch(self.options):
                result = self.compiled(*arguments)
        except (TorchDynamoException, InductorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"this model or drafter cannot be compiled ({reason}): decode without compile"
            ) from error
        self.seconds += time.perf_counter() - started
        self.kinds.add(kind)
        return result


def keep_compiled_code() -> None:
    """Let compiled code outlive the process, unless the user has chosen a place for it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "drafthead"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled"))
