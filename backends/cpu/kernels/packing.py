"""Weights in the order in which our kernels read them.

Decoding multiplies each weight matrix with one row, or with one row a tree node, so a pass is as
fast as weights come from memory: they are packed once, in large pages. Weights of drafts, and of
targets of the type int8, are packed as whole numbers of eight bits, with a scale for each column:
half as much is read, and what a draft guesses changes no answer.
"""

import mmap
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from drafthead.backends.cpu.kernels.kernel_set import SETS, kernel_set
from drafthead.core.storage import large_pages
from drafthead.core.storage.large_pages import PAGE
from drafthead.core.storage.mapped_files import let_go
from drafthead.core.target import int8
from drafthead.core.target.blocks import KINDS, Blocks
from drafthead.core.target.weight_state import weight_state

COLUMNS = 32  # of the product, in a block of packed weights
AT_ONCE = 256  # such blocks, of a matrix that is packed

# Weights are read once a pass, so its speed is that of fetching memory in order. Processors fetch
# ahead only within a page, and find each new page by a walk through tables, in a virtual machine by
# many: with the usual pages of 4 KiB a stream of reads is a good deal slower than with pages of 2
# MiB, where the system has them.
CACHE_LINE = 64
# Weights share mappings of at least this size, of which only what is used takes memory.
MAPPING = 256 * 2**20


class HugePages:
    """Hands out memory [bytes] for tensors, one after the other.

    A mapping is freed with the last of its tensors, but not before the next one begins.
    """

    def __init__(self) -> None:
        self.left = torch.empty(0, dtype=torch.uint8)  # of the current mapping

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a CPU tensor [...], contiguous, in large pages where there are any."""
        return self.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def take(self, count: int) -> torch.Tensor:
        """So many bytes [count] that nobody has."""
        size = -(-count // CACHE_LINE) * CACHE_LINE  # of which tensors share none
        if size > self.left.numel():
            self.left = new_mapping(max(MAPPING, size))
        memory, self.left = self.left[:size], self.left[size:]
        return memory[:count]


def new_mapping(size: int) -> torch.Tensor:
    """At least `size` bytes of memory [bytes] that nobody has, which begin with a page."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # only Linux has it
        return torch.empty(size, dtype=torch.uint8)
    memory = torch.frombuffer(large_pages.new_mapping(size), dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :]


# Packed weights by the first of them: the graphs of a model share one copy.
packed_weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
memory = HugePages()


def pack(
    weights: Sequence[torch.Tensor], paired: bool = False, in_int8: bool = False
) -> torch.Tensor:
    """Weights [N, K], stacked, in the order in which the kernel reads them.

    [N / 32, K / 2, 32, 2]: blocks of 32 columns of the product, with the values that are
    multiplied together next to each other. The last block is padded with zeros. If `paired`, each
    block of the first half is followed by that of the second half: a b c d becomes a c b d.
    `in_int8`: [N / 32, K' / 4 + 2, 32], as `in_int8_blocks` makes them; K' is that of
    `int8.rounded`.
    """
    known = packed_weights.setdefault(weights[0], {})
    key = (paired, in_int8, *(weight.data_ptr() for weight in weights))
    # Weights may have been changed or replaced since a graph of theirs was made. The sum notices
    # what was written by way of `weight.data`, which no version counts.
    values = [(weight_state(weight), checksum(weight)) for weight in weights]
    if key not in known or known[key][0] != values:
        whole = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
        blocks = (in_int8_blocks if in_int8 else in_blocks)(whole)
        if paired:
            blocks = blocks.unflatten(0, (2, -1)).transpose(0, 1)
        copy = memory.copy(blocks).flatten(0, -3)
        if not in_int8:
            copy = copy.view(torch.bfloat16).unflatten(-1, (COLUMNS, 2))
        known[key] = values, copy
    return known[key][1]


def pack_blocks(weights: Sequence[Blocks], paired: bool = False) -> torch.Tensor:
    """Matrices [N, K] in blocks, stacked or paired as by `pack`: [N / 32, bytes], see `blocks.h`.

    They are read where they lie, as in a mapped file, and may be of different kinds.
    """
    known = packed_weights.setdefault(weights[0].raw, {})
    key = (paired, *(weight.raw.data_ptr() for weight in weights))
    if key not in known:
        counts = [-(-weight.shape[0] // COLUMNS) for weight in weights]
        size = max(map(block_bytes, weights))
        made = memory.take(sum(counts) * size).view(-1, size)
        ends = list(accumulate(counts))
        for number, (weight, end) in enumerate(zip(weights, ends, strict=True)):
            own = made[number :: len(weights)] if paired else made[:end][-counts[number] :]
            write_blocks(own, weight)
            # So that a matrix that is wanted alone as well is not packed twice.
            packed_weights.setdefault(weight.raw, {})[False, weight.raw.data_ptr()] = own
        made[:, 1] = sum({1 << list(KINDS).index(weight.kind) for weight in weights})
        known[key] = made
    return known[key]


def write_blocks(packed: torch.Tensor, weight: Blocks) -> None:
    """Pack a matrix into [N / 32, bytes], and let go of its file, a part at a time."""
    kind = list(KINDS).index(weight.kind)
    for start in range(0, len(packed), AT_ONCE):
        raw = weight.raw[start * COLUMNS :][: AT_ONCE * COLUMNS]
        torch.ops.drafthead.write_blocks(packed[start : start + AT_ONCE], raw, kind)
        let_go(raw)


def block_bytes(weight: Blocks) -> int:
    """The number of bytes that 32 columns of a matrix take when they are packed."""
    size = CACHE_LINE + COLUMNS * weight.raw.shape[1]
    # Scales and minima of six bits get eight.
    return size + (weight.shape[1] // 2 if weight.kind in ("Q4_K", "Q5_K") else 0)


def checksum(weight: torch.Tensor) -> int:
    """A sum of the bits of a weight [N, K], K even, read as whole numbers: of its rows and columns
    by their places, which may have changed.
    """
    wide = torch.int64 if weight.shape[1] % 4 == 0 else torch.int32  # fewer numbers
    bits = seen_as(wide, weight)
    sums = torch.cat([bits.sum(dim, dtype=torch.int64) for dim in (0, 1)])
    return int((sums * torch.arange(1, 2 * len(sums), 2)).sum())  # odd factors lose no bit


def seen_as(dtype: torch.dtype, weight: torch.Tensor) -> torch.Tensor:
    """The bits of a weight [N, K] as wider numbers [N, K / n]."""
    whole = weight.contiguous()
    starts_within = whole.storage_offset() * whole.element_size() % dtype.itemsize
    return (whole.clone() if starts_within else whole).view(dtype)


def in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """`pack` of one weight [N, K]: [N / 32, K / 2, 32], with pairs seen as whole numbers."""
    missing = -weight.shape[0] % COLUMNS
    rows = functional.pad(weight, (0, 0, 0, missing)) if missing else weight
    return seen_as(torch.int32, rows).unflatten(0, (-1, COLUMNS)).transpose(1, 2)


def in_int8_blocks(weight: torch.Tensor) -> torch.Tensor:
    """`pack` of one weight [N, K] as whole numbers, of which four are seen as one: see `int8.h`.

    They are followed by where sums start, and by the scales.
    """
    numbers, scales = torch.ops.drafthead.int8_rows(weight)
    missing = -weight.shape[0] % COLUMNS
    fours = functional.pad(numbers, (0, 0, 0, missing)).view(torch.int32)
    starts = functional.pad(where_sums_start(numbers), (0, missing))
    factors = functional.pad(scales / int8.TURNED, (0, missing)).view(torch.int32)
    ends = torch.stack([starts.view(-1, COLUMNS), factors.view(-1, COLUMNS)], dim=1)
    return torch.cat([fours.unflatten(0, (-1, COLUMNS)).transpose(1, 2), ends], dim=1)


def where_sums_start(numbers: torch.Tensor) -> torch.Tensor:
    """Of weights [N, K'] what kernels begin with [N], as they do not multiply a row as it is.

    With VNNI they add 128 to it. Else they take -x - 1 for -x where a weight is negative.
    """
    chosen = kernel_set()
    if chosen is None or SETS[chosen].has_vnni:
        return numbers.sum(-1, dtype=torch.int32) * -128
    return -numbers.clamp_max(0).sum(-1, dtype=torch.int32)


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The blocks' weights [N / 32, 32, K]."""
    return packed.transpose(1, 2).flatten(2)


def unpacked_int8(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks' numbers [N / 32, 32, K'] and scales [N / 32, 32], as `int8.rounded` has them."""
    numbers = packed[:, :-2].transpose(1, 2).contiguous().view(torch.int8)
    return numbers, packed[:, -1].contiguous().view(torch.float32) * int8.TURNED
