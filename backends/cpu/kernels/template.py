"""Calls of our C++ functions in the code that torch generates for a pass."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch._inductor.lowering  # first: the parts of the code generator import each other
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.lowering import lowerings
from torch._inductor.utils import parallel_num_threads

from drafthead.backends.cpu.kernels.library import text_of

KERNEL = """
{{template.header().getvalue()}}
{{functions}}
extern "C"
{{kernel.def_kernel(inputs=inputs, outputs=outputs)}}
{
    {{kernel.maybe_codegen_profile(template.name)}}
    %s
}
"""

Node = Any  # a tensor in the code generator's graph


class KernelTemplate(CppTemplate):
    """A kernel: C++ functions, and a statement that calls one of them."""

    def __init__(
        self,
        name: str,
        call: str,
        inputs: dict[str, Node],
        layout: ir.Layout,
        values: dict[str, Any] | None = None,
        functions: str | None = None,
    ):
        """`functions` is their text or declarations, by default the text of `source/NAME.h`.

        `call` is a Jinja template of C++, which reads the `inputs` and the `values` by name,
        `output`, the number of `threads` at the time of the call, and of a tensor x `start(x)`, a
        pointer to its first value, `size(x, dim)` and `stride(x, dim)`.
        """
        super().__init__(name, list(inputs.values()), layout, parallel_num_threads())
        self.call, self.names, self.values = call, list(inputs), values or {}
        self.functions = text_of(f"{name}.h") if functions is None else functions

    def render(self, **given: Any) -> str:
        """The code for the inputs at hand."""
        assert not given.get("epilogue_nodes")  # a kernel stores what it computes
        kernel, output = given["kernel"], given.get("template_buffer_node") or self.output_node
        inputs = dict(zip(self.names, self.input_nodes, strict=True))

        def start(x: Node) -> str:
            return f"&{kernel.index(x, [0] * len(x.get_size()))}"

        return self._template_from_string(KERNEL % self.call).render(
            template=self,
            functions=self.functions,
            kernel=kernel,
            inputs=inputs,
            outputs=self.outputs(output),
            **inputs,
            **self.values,
            output=output,
            start=start,
            size=kernel.size,
            stride=kernel.stride,
            threads=f"std::min({self.num_threads}, omp_get_max_threads())",
        )

    def outputs(self, output: Node) -> dict[str, Node]:
        """The tensors that the kernel is given to write to."""
        return {"output": output}


def call_by_rows(
    name: str,
    call: str,
    inputs: dict[str, Node],
    size: Sequence[int],
    dtype: torch.dtype,
    values: dict[str, Any] | None = None,
    functions: str | None = None,
) -> Node:
    """The output [..., *size] of a kernel, from the first of its inputs, [..., K].

    The kernel itself sees [rows, K] and [rows, *size], and all inputs contiguous.
    """
    (first, x), *others = inputs.items()
    *outer, inner = x.get_size()
    view = lowerings[torch.ops.aten.view.default]
    nodes = {first: view(x, [prod(outer), inner]), **dict(others)}
    nodes = {key: ir.ExternKernel.require_contiguous(node) for key, node in nodes.items()}
    layout = ir.FixedLayout(x.get_device(), dtype, [prod(outer), *size], [*size, 1])
    template = KernelTemplate(name, call, nodes, layout, values, functions)
    return view(template.generate().output_node(), [*outer, *size])
