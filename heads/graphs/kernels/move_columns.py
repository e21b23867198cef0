"""Moving columns of a whole cache in one function that leaves alone what is where it belongs.

The code generator copies the columns of every node, those of each layer's keys and values in loops
of their own and by way of new memory. Few of them are accepted, and most of these stand right.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch._inductor.lowering  # first: the parts of the code generator import each other
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.lowering import register_lowering


@torch.library.custom_op("drafthead::move_columns", mutates_args=("layers",))
def move_columns(
    layers: Sequence[torch.Tensor],  # of each [B, H, capacity, D], the D numbers side by side
    source: torch.Tensor,  # [B, P]
    destination: torch.Tensor,  # [B, P]
) -> None:
    """Copy each row's columns `source`, which ascend, to `destination`, none behind its source.

    Source 4 6 and destination 4 5 turn columns ``. . . . a b c`` into ``. . . . a c c``.
    """
    rows = torch.arange(source.shape[0])[:, None]
    for layer in layers:
        layer[rows, :, destination] = layer[rows, :, source]


class MoveTemplate(CppTemplate):
    """The source of the function, for the code generator."""

    SOURCE = r"""
{{template.header().getvalue()}}
#include <cstring>

extern "C"
{{kernel.def_kernel(inputs=inputs, outputs=outputs)}}
{
    {{kernel.maybe_codegen_profile("move")}}
    const int64_t rows = {{kernel.size(source, 0)}}, moves = {{kernel.size(source, 1)}};
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t m = 0; m < moves; ++m) {
            const int64_t from = source[r * moves + m], to = destination[r * moves + m];
            if (from == to) continue;
            {%- for name, layer in layers.items() %}
            for (int64_t h = 0; h < {{kernel.size(layer, 1)}}; ++h) {
                auto* column = const_cast<{{kernel.dtype(layer)}}*>({{name}})
                    + r * {{kernel.stride(layer, 0)}} + h * {{kernel.stride(layer, 1)}};
                std::memcpy(column + to * {{kernel.stride(layer, 2)}},
                            column + from * {{kernel.stride(layer, 2)}},
                            sizeof(*column) * {{kernel.size(layer, 3)}});
            }
            {%- endfor %}
        }
    }
}
"""

    def render(self, **given: Any) -> str:
        """The source for the inputs at hand; nothing is fused behind it."""
        assert not given.get("epilogue_nodes")
        *layers, source, destination = self.input_nodes
        named = {f"layer{place}": layer for place, layer in enumerate(layers)}
        options = {
            "template": self,
            "kernel": given["kernel"],
            "layers": named,
            "inputs": named | {"source": source, "destination": destination},
            "source": source,
            # The code generator asks for an output, but one that nobody reads has no memory.
            "outputs": {} if "template_buffer_node" in given else {"nothing": self.output_node},
        }
        return self._template_from_string(self.SOURCE).render(**options)


class InPlace(ir.CppTemplateBuffer):
    """A function that changes its first inputs."""

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
def _lower(layers: Sequence[Any], source: Any, destination: Any) -> None:
    """The operation in the code generator's graph."""
    inputs = [ir.ExternKernel.realize_input(layer) for layer in layers]
    assert all(layer.get_stride()[-1] == 1 for layer in inputs)
    inputs += [ir.ExternKernel.require_contiguous(place) for place in (source, destination)]
    layout = ir.FixedLayout(source.get_device(), torch.int64, [1], [1])
    InPlace(MoveTemplate("move", inputs, layout, 1), len(layers))
