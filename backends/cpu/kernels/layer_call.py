"""The call of a layer that was compiled on its own, within the code of a whole pass."""

from collections.abc import Sequence
from typing import Any

import torch
import torch._inductor.lowering  # first: the parts of the code generator import each other
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from drafthead.backends.cpu.kernels.template import Node, text_of
from drafthead.backends.cpu.layers.callable_code import Input


@torch.library.custom_op("drafthead::layer", mutates_args=())
def layer(
    inputs: Sequence[torch.Tensor], table: torch.Tensor, row: int, places: Sequence[int]
) -> torch.Tensor:
    """The output [B, T, D] of a layer for its tensors, of which the first is its input [B, T, D].

    `table` and `row` are as in `source/layer_call.h`. `places` are tensor and dimension of each
    input of the code, one after the other. Keys and values among the inputs are written to: each
    layer has its own, which nothing reads before the output of the pass is known.
    """
    raise NotImplementedError("a layer's code is called by compiled passes only")


@layer.register_fake
def _(
    inputs: Sequence[torch.Tensor], table: torch.Tensor, row: int, places: Sequence[int]
) -> torch.Tensor:
    return torch.empty_like(inputs[0], memory_format=torch.contiguous_format)


class LayerCall(ir.ExternKernelAlloc):
    """The call in the code generator's graph."""

    def __init__(self, inputs: Sequence[Node], table: Node, row: int, places: Sequence[Input]):
        hidden = inputs[0]
        layout = ir.FixedLayout(hidden.get_device(), hidden.get_dtype(), hidden.get_size())
        super().__init__(layout, [*inputs, table])
        self.row, self.places = row, places

    def codegen(self, wrapper: Any) -> None:
        """Write the call."""
        text = text_of("layer_call.h")
        if text not in wrapper.header.getvalue():
            wrapper.header.splice(text)
        nodes: Sequence[Node] = self.inputs
        *tensors, table = [node.codegen_reference() for node in nodes]
        given = ", ".join(f"{{{tensors[place]}, {dim}}}" for place, dim in self.places)
        call = f"call_layer({table}, {self.row}, {{{given}}})"
        wrapper.writeline(f"RAIIAtenTensorHandle {self.get_name()}({call});")


@register_lowering(torch.ops.drafthead.layer.default, type_promotion_kind=None)
def _lower(inputs: Sequence[Node], table: Node, row: int, places: Sequence[int]) -> Node:
    """The operation in the code generator's graph."""
    realized = [ir.ExternKernel.realize_input(x) for x in (*inputs, table)]
    *tensors, addresses = map(ir.ExternKernel.require_contiguous, realized)
    # What is written to must be the cache itself.
    assert all(tensors[place].get_name() in V.graph.graph_inputs for place in (1, 2))
    pairs = [Input(*pair) for pair in zip(places[::2], places[1::2], strict=True)]
    return ir.TensorBox.create(LayerCall(tensors, addresses, row, pairs))
