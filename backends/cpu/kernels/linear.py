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

Weights of drafts, and of targets of the type int7, are packed in bytes: seven bits each, and a
scale for each column. Half as much is read; what a draft guesses changes no answer.

Every row is summed in the same order whatever the number of rows, so that its product has the same
bits in a pass over one token as in a pass over a tree.
"""

from collections.abc import Sequence

import torch
from torch._inductor.lowering import register_lowering
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from drafthead.backends.cpu.kernels.huge_pages import HugePages
from drafthead.backends.cpu.kernels.library import declarations
from drafthead.backends.cpu.kernels.template import Node, call_by_rows
from drafthead.heads.target.seven_bits import LEVELS, rounded
from drafthead.heads.target.weight_state import weight_state

COLUMNS = 32  # of the product, in a block of packed weights
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

# Packed weights by the first of them: the graphs of a model share one copy.
packed_weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
memory = HugePages()


@torch.library.custom_op("drafthead::pack", mutates_args=())
def pack(
    weights: Sequence[torch.Tensor], paired: bool = False, in_bytes: bool = False
) -> torch.Tensor:
    """Weights [N, K], stacked, in the order in which the kernel reads them.

    [N / 32, K / 2, 32, 2]: blocks of 32 columns of the product, with the values that are
    multiplied together next to each other. The last block is padded with zeros. If `paired`, each
    block of the first half is followed by that of the second half: a b c d becomes a c b d.
    `in_bytes`: [N / 32, K / 4 + 1, 32, 2], bytes as `in_byte_blocks` makes them, for K a multiple
    of 8.
    """
    known = packed_weights.setdefault(weights[0], {})
    key = (paired, in_bytes, *(weight.data_ptr() for weight in weights))
    # Weights may have been changed or replaced since a graph of theirs was made. The sum notices
    # what was written by way of `weight.data`, which no version counts.
    values = [(weight_state(weight), checksum(weight)) for weight in weights]
    if key not in known or known[key][0] != values:
        blocks = (in_byte_blocks if in_bytes else in_blocks)(torch.cat(list(weights)))
        if paired:
            blocks = blocks.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        known[key] = values, memory.copy(blocks)
    return known[key][1]


def checksum(weight: torch.Tensor) -> int:
    """The sum of the values of a weight [N, K], read as whole numbers."""
    return int(weight.view(torch.int16).sum(dtype=torch.int64))


def in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """`pack` of one weight [N, K]."""
    missing = -weight.shape[0] % COLUMNS
    columns = functional.pad(weight, (0, 0, 0, missing)).unflatten(0, (-1, COLUMNS))
    return columns.unflatten(-1, (-1, 2)).transpose(1, 2).contiguous()


def in_byte_blocks(weight: torch.Tensor) -> torch.Tensor:
    """`pack` of one weight [N, K] in bytes, which are seen as bfloat16: see `multiply.h`."""
    missing = -weight.shape[0] % COLUMNS
    columns = functional.pad(weight, (0, 0, 0, missing)).unflatten(0, (-1, COLUMNS))
    numbers, scales = rounded(columns)
    values = (numbers + LEVELS + 1).to(torch.uint8)  # 1 to 127
    values = values.unflatten(-1, (-1, 2)).transpose(1, 2).flatten(1)
    parts = values.view(torch.bfloat16), scales.view(torch.bfloat16)
    return torch.cat(parts, dim=1).unflatten(1, (-1, COLUMNS, 2))


def unpacked(packed: torch.Tensor, inner: int) -> torch.Tensor:
    """The blocks' weights [N / 32, 32, K], where K is `inner`."""
    if not is_in_bytes(packed.shape[1], inner):
        return packed.transpose(1, 2).flatten(2)
    blocks = packed.flatten(1).contiguous()
    values = blocks[:, : 16 * inner].view(torch.uint8).unflatten(1, (-1, COLUMNS, 2))
    scales = blocks[:, 16 * inner :].view(torch.float32)
    weights = (values.transpose(1, 2).flatten(2).float() - LEVELS - 1) * scales[..., None]
    return weights.to(packed.dtype)


def is_in_bytes(lines: int, inner: int) -> bool:
    """Whether packed weights [N / 32, lines, 32, 2] of K `inner` are in bytes."""
    return lines != inner // 2


@pack.register_fake
def _(
    weights: Sequence[torch.Tensor], paired: bool = False, in_bytes: bool = False
) -> torch.Tensor:
    columns, inner = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    lines = inner // 4 + 1 if in_bytes else inner // 2
    return weights[0].new_empty(-(-columns // COLUMNS), lines, COLUMNS, 2)


@torch.library.custom_op("drafthead::linear", mutates_args=())
def linear(
    x: torch.Tensor,  # [..., K]
    packed: torch.Tensor,  # [N / 32, .., 32, 2], from `pack`
    size: int,  # N
    bias: torch.Tensor | None,  # [N]
) -> torch.Tensor:
    """x weight^T + bias [..., N]."""
    weight = unpacked(packed, x.shape[-1]).flatten(0, 1)[:size]
    return functional.linear(x, weight, bias)


@linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, size: int, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], size)


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
def _lower_gated(x: Node, packed: Node, size: int) -> Node:
    """The operation in the code generator's graph."""
    inputs, form = {"x": x, "packed": packed}, form_of(x, packed)
    return call_by_rows("gated_mlp", GATED, inputs, [size], x.get_dtype(), form, declarations())
