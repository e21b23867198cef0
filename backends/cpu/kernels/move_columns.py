"""Moving columns of a whole cache in one function, which leaves alone what is in place already.

The code generator would copy the columns of every node, with a loop for each layer's keys and
another for its values, by way of new memory. Few of them are accepted, and most of those are in
place.
"""

from collections.abc import Sequence

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from drafthead.backends.cpu.kernels.template import KernelTemplate, Node
from drafthead.heads.kv_cache.column_cache import move_columns

CALL = """
    for_moves({{start(source)}}, {{start(destination)}}, {{size(source, 0)}}, {{size(source, 1)}},
              [&](int64_t row, int64_t from, int64_t to) {
    {%- for layer in layers %}
        move_column({{start(layer)}},
                    LayerSteps{ {{stride(layer, 0)}}, {{stride(layer, 1)}}, {{stride(layer, 2)}} },
                    {{size(layer, 1)}}, {{size(layer, 3)}}, row, from, to);
    {%- endfor %}
    });
"""
move = torch.library.custom_op(
    "drafthead::move_columns", move_columns, mutates_args=("keys", "values")
)


class MoveTemplate(KernelTemplate):
    """The kernel, which writes to its inputs."""

    def outputs(self, output: Node) -> dict[str, Node]:
        """The code generator asks for an output, but one that nobody reads has no memory."""
        return {"output": output} if output is self.output_node else {}


class InPlace(ir.CppTemplateBuffer):
    """A kernel that changes its first inputs, in the code generator's graph."""

    def __init__(self, template: MoveTemplate, changed: int):
        caller = template.generate()
        super().__init__(
            caller.layout,
            caller.input_nodes,
            caller.make_kernel_render,
            template,  # type: ignore[arg-type]
            caller,
        )
        nowhere, layers = ir.NoneLayout(device=caller.layout.device), caller.input_nodes[:changed]
        self.mutation_outputs = [ir.MutationOutput(nowhere, layer, self) for layer in layers]

    def get_outputs(self) -> list[ir.Buffer]:
        """What it writes: a mark that it is done, and the inputs that it changes."""
        return [self, *self.mutation_outputs]


@register_lowering(torch.ops.drafthead.move_columns.default, type_promotion_kind=None)
def _lower(keys: Sequence[Node], values: Sequence[Node], source: Node, destination: Node) -> None:
    """The operation in the code generator's graph."""
    layers = [ir.ExternKernel.realize_input(layer) for layer in (*keys, *values)]
    # The numbers of a column are copied as one.
    assert all(layer.get_stride()[-1] == 1 for layer in layers)
    inputs = {f"layer{place}": layer for place, layer in enumerate(layers)}
    for name, columns in (("source", source), ("destination", destination)):
        inputs[name] = ir.ExternKernel.require_contiguous(columns)
    layout = ir.FixedLayout(source.get_device(), torch.int64, [1], [1])
    InPlace(MoveTemplate("move_columns", CALL, inputs, layout, {"layers": layers}), len(layers))
