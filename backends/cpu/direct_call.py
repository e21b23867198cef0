"""Calling a compiled graph without what torch does around each call.

At every call of a compiled function torch enters its tracer, finds the graph, flattens the
arguments and assembles the outputs: a good part of a small model's pass, because the pass before
has flushed the CPU caches. Here the code that torch generated is called itself, with what torch
noted when it was made: the places of its inputs among the arguments, and the conditions on them.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from pydoc import locate
from typing import Any

import torch
from torch._dynamo.convert_frame import GlobalStateGuard

from drafthead.backends.cpu.graph_record import ARGUMENTS, GraphRecord, twins
from drafthead.backends.cpu.layouts import checker, layout_of
from drafthead.backends.cpu.recipes import Recipes
from drafthead.backends.cpu.threads import threads
from drafthead.backends.fingerprint import UndescribedError

Outputs = Sequence[torch.Tensor]
Form = dict[str, Any]  # of a value, in JSON


class OtherLayoutError(Exception):
    """The arguments do not meet the conditions under which a graph was made."""


class Recorder:
    """A backend of `torch.compile`: Inductor, with a record of the one graph that is made."""

    def __init__(self, options: dict[str, Any], recipes: Recipes):
        """`options` are Inductor's; `recipes` learn where the graph's constants come from."""
        self.options, self.recipes = options, recipes
        self.inputs: list[str] = []  # the places of the graph's inputs, as torch's expressions
        self.examples: list[Any] = []  # of the inputs, with symbols for sizes that may change
        self.run: Any  # the graph as torch calls it
        self.code: Any  # torch's CompiledFxGraph
        self.constants: dict[str, Any] = {}
        # Of the first call, by way of torch and within it.
        self.outer: tuple[Sequence[Any], Outputs] = ((), ())
        self.inner: tuple[Sequence[Any], Outputs] = ((), ())

    def __call__(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compile the graph; what is returned notes the outputs of its calls."""
        from torch._inductor.compile_fx import compile_fx  # takes seconds

        self.note_inputs(graph)
        with self.recipes.watch():
            generate: Any = self._generated
            run: Any = compile_fx(
                graph, list(examples), inner_compile=generate, config_patches=self.options
            )
            self.run = run
        return self._noted

    def note_inputs(self, graph: torch.fx.GraphModule) -> None:
        """Note what a traced graph takes; raises TypeError for what is no argument."""
        nodes = graph.graph.find_nodes(op="placeholder")
        names = [node.meta["grapharg"].source.name for node in nodes]
        self.inputs = [name() if callable(name) else name for name in names]  # older torch: methods
        if strange := [name for name in self.inputs if not name.startswith(ARGUMENTS)]:
            raise TypeError(
                f"it reads {', '.join(strange)}, which is no argument, parameter or buffer"
            )
        self.examples = [node.meta["example_value"] for node in nodes]

    def _generated(
        self, graph: torch.fx.GraphModule, examples: Sequence[Any], **options: Any
    ) -> Any:
        """Generate code for a graph whose weights are frozen; see `__call__`."""
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.output_code import CompiledFxGraphConstantsWithGm

        self.code = compile_fx_inner(graph, examples, **options)
        self.constants = CompiledFxGraphConstantsWithGm(graph).unwrap(self.code)

        def noted(inputs: list[Any]) -> Outputs:
            given = list(inputs)  # which the code empties
            self.inner = given, self.code(inputs)
            return self.inner[1]

        noted._boxed_call = True  # type: ignore[attr-defined]
        return noted

    def _noted(self, *inputs: Any) -> Outputs:
        """Run the graph by way of torch."""
        self.outer = inputs, self.run(*inputs)
        return self.outer[1]

    def finish(
        self, result: Any, arguments: Sequence[Any]
    ) -> tuple[Callable[..., Any], GraphRecord | None]:
        """The graph as a function, and what a file needs to hold of it, if a file can.

        It has just been called for the first time, with `arguments`, and `result` was the value.
        The function takes the same arguments; it raises OtherLayoutError for those that the graph
        was not made for.
        """
        run, constants = self.code.current_callable, None
        # Where torch hands its inputs on as they are, and the outputs back, it can be left out.
        if not (same_objects(*self.inputs_seen()) and same_objects(*self.outputs_seen())):
            run = self._by_torch  # which does more for this function than call the generated code
        else:
            with suppress(UndescribedError):
                constants = {name: self.recipes.of(t) for name, t in self.constants.items()}
        record = GraphRecord(
            self.inputs,
            twins(arguments),
            layout_of(self.examples),
            form_of(result, self.outer[1]),
            self.code.source_code,
            constants or {},
        )
        call = direct_call(record, run, arguments)
        # They would keep the first call's tensors, and a second copy of the weights, alive.
        self.outer, self.inner, self.constants = ((), ()), ((), ()), {}
        return call, None if constants is None else record

    def inputs_seen(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Inputs of torch's own call, and inputs of the generated code."""
        return self.outer[0], self.inner[0]

    def outputs_seen(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Outputs of torch's own call, and outputs of the generated code."""
        return self.outer[1], self.inner[1]

    def _by_torch(self, inputs: list[Any]) -> Outputs:
        return self.run(*inputs)


def direct_call(
    record: GraphRecord, run: Callable[[list[Any]], Outputs], arguments: Sequence[Any]
) -> Callable[..., Any]:
    """The function that `run` computes, for arguments like these; see `Recorder.finish`."""
    read, assemble = record.reader(), assembly(record.value)
    inputs = read({"arguments": arguments})
    assert inputs is not None
    fits, as_then = checker(record.layout, inputs), GlobalStateGuard().check

    def call(*arguments: Any) -> Any:
        """The function's value; raises OtherLayoutError for arguments of another layout."""
        # What torch would have guarded: its global state, types, sizes, strides, equal inputs.
        inputs = read({"arguments": arguments})
        if inputs is None or not (as_then() and fits(inputs)):
            raise OtherLayoutError
        with threads.for_a_call():
            return assemble(run(inputs))

    return call


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same tensors, and equal numbers."""
    pairs = zip(some, others, strict=False)
    tensors = all(a is b or (isinstance(a, int) and a == b) for a, b in pairs)
    return len(some) == len(others) and tensors


def form_of(value: Any, outputs: Outputs) -> Form:
    """How a function's value is put together from its graph's outputs.

    For the value (b, (a, None)) of the outputs a, b: parts of which the first is output 1, and so
    on, see `assembly`.
    """
    if value is None or (isinstance(value, int) and all(map(torch.is_tensor, outputs))):
        return {"constant": value}  # what the graph does not put out is the same at every call
    for place, output in enumerate(outputs):
        if value is output:
            return {"output": place}
    if not isinstance(value, tuple):
        raise TypeError(f"a compiled function cannot return {type(value).__name__}")
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return {"parts": [form_of(part, outputs) for part in value], "type": kind}


def assembly(form: Form) -> Callable[[Outputs], Any]:
    """What puts a value together: (y, (x, None)) of x, y for the form of (b, (a, None)).

    Raises AttributeError for a type that there is not.
    """
    if "constant" in form:
        return lambda _: form["constant"]
    if "output" in form:
        return itemgetter(form["output"])
    parts = [assembly(part) for part in form["parts"]]
    kind: Any = locate(form["type"])
    together = getattr(kind, "_make", tuple)  # of a NamedTuple, or of any other
    return lambda outputs: together([part(outputs) for part in parts])
