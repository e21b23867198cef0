"""What follows a pass: drawing the target's own tokens, the few largest of many, moving columns.

**Draws.** torch writes out the probabilities, random numbers of the whole vocabulary and, for
top-p, a sorted copy, for every node of the tree. Here only the nodes on the accepted path are
drawn. The largest logits, down to where a filter can cut, are found by halving a bound; only they
are sorted. The logarithm behind a token's arrival time is computed where a bound without it does
not already say that another token comes first.

**The largest.** torch sorts a good part of a row to find its eight best of thousands, and prepares
for longer than it sorts. Here a row is compared with the last of its best so far, eight or sixteen
numbers at a time, and hardly any is larger.

**Moves.** The code generator would copy the columns of every node, with a loop for each layer's
keys and another for its values, by way of new memory. Few of them are accepted, and most of those
are in place: one function moves the others.
"""

from collections.abc import Sequence

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from drafthead.backends.cpu.kernels.operations import MOST
from drafthead.backends.cpu.kernels.template import KernelTemplate, Node, call_by_rows

DRAW = """
    draw({{start(logits)}}, {{start(tokens)}}, {{start(parents)}}, {{start(keys)}},
         {{start(settings)}}, {{start(output)}}, {{size(tokens, 0)}}, {{size(tokens, 1)}},
         {{size(logits, 1)}}, {{threads}});
"""
TOP = """
    top<{{most}}>({{start(x)}}, {{size(x, 0)}}, {{size(x, 1)}}, {{start(output)}},
                  {{size(output, 1)}}, {{threads}});
"""
MOVES = """
    for_moves({{start(source)}}, {{start(destination)}}, {{size(source, 0)}}, {{size(source, 1)}},
              [&](int64_t row, int64_t from, int64_t to) {
    {%- for layer in layers %}
        move_column({{start(layer)}},
                    LayerSteps{ {{stride(layer, 0)}}, {{stride(layer, 1)}}, {{stride(layer, 2)}} },
                    {{size(layer, 1)}}, {{size(layer, 3)}}, row, from, to);
    {%- endfor %}
    });
"""


@register_lowering(torch.ops.drafthead.draw.default, type_promotion_kind=None)
def _lower_draw(
    logits: Node, tokens: Node, parents: Node, keys: Node, settings: Node, filtered: bool
) -> Node:
    """The operation in the code generator's graph."""
    inputs = {
        "logits": logits,
        "tokens": tokens,
        "parents": parents,
        "keys": keys,
        "settings": settings,
    }
    return call_by_rows("draw", DRAW, inputs, size=(), dtype=torch.int64)


@register_lowering(torch.ops.drafthead.top.default, type_promotion_kind=None)
def _lower_top(x: Node, count: int) -> Node:
    """The operation in the code generator's graph."""
    return call_by_rows("top_k", TOP, {"x": x}, [count], torch.int64, {"most": MOST})


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
def _lower_moves(
    keys: Sequence[Node], values: Sequence[Node], source: Node, destination: Node
) -> None:
    """The operation in the code generator's graph."""
    layers = [ir.ExternKernel.realize_input(layer) for layer in (*keys, *values)]
    # The numbers of a column are copied as one.
    assert all(layer.get_stride()[-1] == 1 for layer in layers)
    inputs = {f"layer{place}": layer for place, layer in enumerate(layers)}
    for name, columns in (("source", source), ("destination", destination)):
        inputs[name] = ir.ExternKernel.require_contiguous(columns)
    layout = ir.FixedLayout(source.get_device(), torch.int64, [1], [1])
    InPlace(MoveTemplate("move_columns", MOVES, inputs, layout, {"layers": layers}), len(layers))
