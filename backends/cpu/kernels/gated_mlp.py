"""The first half of a gated MLP, silu(x gate^T) * (x up^T), of few bfloat16 rows.

As separate operations silu and product touch little memory, but make the threads wait for each
other once more in every layer. Here each thread finishes the columns that it has multiplied. The
blocks of both weights alternate in memory, in the order in which they are read.
"""

import torch
from torch._inductor.lowering import register_lowering
from torch.nn import functional

from drafthead.backends.cpu.kernels.library import declarations
from drafthead.backends.cpu.kernels.linear import form_of, unpacked
from drafthead.backends.cpu.kernels.template import Node, call_by_rows

CALL = """
    DRAFTHEAD_LIBRARY::gated(
        {{start(x)}}, {{start(packed)}}, {{start(output)}}, {{size(x, 0)}}, {{size(x, 1)}},
        {{size(output, 1)}}, {{in_bytes}}, {{threads}});
"""


@torch.library.custom_op("drafthead::gated", mutates_args=())
def gated(
    x: torch.Tensor,  # [..., K]
    packed: torch.Tensor,  # [2N / 32, .., 32, 2], paired, from `linear.pack`
    size: int,  # N, a multiple of 32
) -> torch.Tensor:
    """silu(x gate^T) * (x up^T) [..., N]."""
    rows = unpacked(packed, x.shape[-1])
    gate, up = (functional.linear(x, rows[half::2].flatten(0, 1)) for half in range(2))
    return functional.silu(gate) * up


@gated.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, size: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], size)


@register_lowering(torch.ops.drafthead.gated.default, type_promotion_kind=None)
def _lower(x: Node, packed: Node, size: int) -> Node:
    """The operation in the code generator's graph."""
    inputs, form = {"x": x, "packed": packed}, form_of(x, packed)
    return call_by_rows("gated_mlp", CALL, inputs, [size], x.get_dtype(), form, declarations())
