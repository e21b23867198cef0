"""Graphs as torch traces them, run as they are: what tests of graphs need without compiling code.

Tracing finds out what one graph can serve: its sizes, its layouts, what it reads. A C++ compiler
then takes most of the seconds, and what it makes computes the same.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafthead.backends import compiled
from drafthead.backends.cpu.direct_call import Recorder


class Traced(Recorder):
    """Stands for a `Recorder` without Inductor; its graphs cannot be kept on the disk."""

    def __call__(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Note what the graph's inputs are; what is returned notes the outputs of its calls."""
        self.note_inputs(graph)
        self.run = graph.forward
        self.code = SimpleNamespace(current_callable=self._by_torch, source_code="")
        return self._noted

    def _by_torch(self, inputs: Sequence[Any]) -> Any:
        return self.run(*inputs)

    def finish(self, result: Any, arguments: Sequence[Any]) -> tuple[Callable[..., Any], None]:
        """The graph as a function, which raises for other layouts as compiled ones do."""
        call, _ = super().finish(result, arguments)
        return call, None


@contextmanager
def graphs_are_traced() -> Iterator[None]:
    """Graphs that are made within are `Traced`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "Recorder", Traced)
        yield
