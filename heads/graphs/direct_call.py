"""Calling a compiled graph without what torch does around each call.

At every call of a compiled function torch enters its tracer, finds the graph, flattens the
arguments and assembles the outputs: a good part of a small model's pass, because the pass before
has flushed the CPU caches. Here the graph is called with what torch recorded when it was made: the
conditions on its arguments, which are checked as torch checks them, and the places of its inputs
among the arguments.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch._inductor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

Outputs = Sequence[torch.Tensor]


class OtherLayoutError(Exception):
    """The arguments do not meet the conditions under which a graph was made."""


class Recorder:
    """A backend of `torch.compile`: Inductor, with a record of the one graph that is made."""

    def __init__(self, options: dict[str, Any]):
        """`options` are Inductor's."""
        self.options = options
        self.inputs: list[str] = []  # the places of the graph's inputs, as torch's expressions
        self.run: Callable[..., Outputs]
        self.outputs: Outputs = ()  # of the first call

    def __call__(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compile the graph; what is returned notes the outputs of its calls."""
        nodes = graph.graph.find_nodes(op="placeholder")
        names = [node.meta["grapharg"].source.name for node in nodes]
        self.inputs = [name() if callable(name) else name for name in names]  # older torch: methods
        self.run = torch._inductor.compile(graph, list(examples), self.options)
        return self.noted

    def noted(self, *inputs: Any) -> Outputs:
        """Run the graph by way of torch."""
        self.outputs = self.run(*inputs)
        return self.outputs

    def direct_call(self, traced: Callable[..., Any], result: Any) -> Callable[..., Any]:
        """The graph of `traced(*arguments)`, which has just been called for the first time.

        What it returns takes the same arguments; it raises OtherLayoutError for those that the
        graph was not made for.
        """
        [entry] = _debug_get_cache_entry_list(traced.__code__)
        fits = entry.guard_manager.check
        # torch's own expressions, such as L['arguments'][7][0].size()[2], which it also evaluates
        # to check its conditions.
        inputs = eval(f"lambda L: ({', '.join(self.inputs)},)")
        run, assemble = self.run, assembly(result, self.outputs)
        self.outputs = ()

        def call(*arguments: Any) -> Any:
            scope = {"arguments": arguments}
            if not fits(scope):
                raise OtherLayoutError
            return assemble(run(*inputs(scope)))

        return call


def assembly(value: Any, outputs: Outputs) -> Callable[[Outputs], Any]:
    """How a function's value is put together from its graph's outputs.

    The value (b, (a, None)) of the outputs a, b becomes (y, (x, None)) for the outputs x, y.
    """
    if value is None or (isinstance(value, int) and all(map(torch.is_tensor, outputs))):
        return lambda _: value  # what the graph does not put out is the same at every call
    for place, output in enumerate(outputs):
        if value is output:
            return itemgetter(place)
    if not isinstance(value, tuple):
        raise TypeError(f"a compiled function cannot return {type(value).__name__}")
    parts = [assembly(part, outputs) for part in value]
    together = getattr(type(value), "_make", tuple)  # of a NamedTuple, or of any other
    return lambda outputs: together([part(outputs) for part in parts])
