"""Matrix products of few bfloat16 rows.

Decoding multiplies each weight matrix with one row, or with one row a tree node, so a pass is as
fast as weights come from memory. oneDNN, which torch calls by default, spends about 20 us on each
call and reads at half of the memory's speed. Here weights are packed once in the order in which
they are read, and one function multiplies up to twelve rows at a time with a block of 32 columns;
with AVX2, which has half as many registers of half the width, six rows with 16 columns, in float32.

The first half of a gated MLP, silu(x gate^T) * (x up^T), is one function as well: as separate
operations silu and product touch little memory, but make the threads wait for each other once more
in every layer. Each thread finishes the columns that it has multiplied; the blocks of both weights
alternate in memory, in the order in which they are read.

Every row is summed in the same order whatever the number of rows, so that its product has the same
bits in a pass over one token as in a pass over a tree.
"""

import torch
from torch._inductor.lowering import register_lowering

from drafthead.backends.cpu.kernels import operations  # noqa: F401  (makes them known to torch)
from drafthead.backends.cpu.kernels.library import declarations
from drafthead.backends.cpu.kernels.packing import is_in_bytes
from drafthead.backends.cpu.kernels.template import Node, call_by_rows

CALL = """
    DRAFTHEAD_LIBRARY::linear(
        {{start(x)}}, {{start(packed)}}, {{start(bias) if bias is defined else "nullptr"}},
        {{start(output)}}, {{size(x, 0)}}, {{size(x, 1)}}, {{size(output, 1)}},
        {{in_bytes}}, {{threads}});
"""
GATED = """
    DRAFTHEAD_LIBRARY::gated(
        {{start(x)}}, {{start(packed)}}, {{start(output)}}, {{size(x, 0)}}, {{size(x, 1)}},
        {{size(output, 1)}}, {{in_bytes}}, {{threads}});
"""


@register_lowering(torch.ops.drafthead.linear.default, type_promotion_kind=None)
def _lower(x: Node, packed: Node, size: int, bias: Node | None) -> Node:
    """The operation in the code generator's graph."""
    inputs = {"x": x, "packed": packed} | ({} if bias is None else {"bias": bias})
    form = form_of(x, packed)
    return call_by_rows("linear", CALL, inputs, [size], x.get_dtype(), form, declarations())


def form_of(x: Node, packed: Node) -> dict[str, str]:
    """How a kernel is to read packed weights."""
    lines, inner = int(packed.get_size()[1]), int(x.get_size()[-1])
    return {"in_bytes": "true" if is_in_bytes(lines, inner) else "false"}


@register_lowering(torch.ops.drafthead.gated.default, type_promotion_kind=None)
def _lower_gated(x: Node, packed: Node, size: int) -> Node:
    """The operation in the code generator's graph."""
    inputs, form = {"x": x, "packed": packed}, form_of(x, packed)
    return call_by_rows("gated_mlp", GATED, inputs, [size], x.get_dtype(), form, declarations())
