"""Attention of a token tree and of all that its rows have committed, on a CUDA device.

Whatever differs from step to step is read on the device, so one recording serves all lengths. Of a
row with 5 committed positions and a node that does not see the first two of them (a window, say)::

    columns of the cache    0 1 2 3 4 . . start ...
    seen by the node            # # #       as the bits of its number in `ancestors` say

There is no mask. The tree's own keys and values come as the pass made them, and go into the cache
on the way. Query heads that share keys are rows of one product, so that no key is copied or read
twice for them.
"""

import logging
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from triton import cdiv, next_power_of_2
from triton.compiler.compiler import max_shared_mem
from triton.runtime.errors import OutOfResources

from drafthead.backends.cuda import MOST_NODES
from drafthead.backends.cuda.attention_kernels import LOG2_E, attend, merge

# Wider heads leave too few registers.
WIDEST_HEAD = 256
MOST_SPLITS = 64
# Programs that a multiprocessor should have, so that one computes while another waits for memory.
PROGRAMS_EACH = 2

logger = logging.getLogger(__name__)


class States(NamedTuple):
    """The tensors that a kernel computes with; the last dimension D has a stride of one."""

    query: torch.Tensor  # [B, H, N, D]
    key_cache: torch.Tensor  # [B, G, C, D]
    value_cache: torch.Tensor  # [B, G, C, D] with the strides of the keys
    new_keys: torch.Tensor  # [B, G, N, D]
    new_values: torch.Tensor  # [B, G, N, D]


class Outputs(NamedTuple):
    """The first kernel's output: parts for the second, or all where there is one split.

    A part is the attention to the keys of one split, its weight the logarithm of their sum.
    """

    output: torch.Tensor  # [B, N, H, D]
    parts: torch.Tensor | None  # [B, N, H, splits, D]
    weights: torch.Tensor | None  # [B, N, H, splits]

    @classmethod
    def to(cls, query: torch.Tensor, splits: int) -> "Outputs":
        """Memory for what a call with the query [B, H, N, D] writes."""
        rows, heads, nodes, size = query.shape
        output = query.new_empty(rows, nodes, heads, size)
        if splits == 1:
            return cls(output, None, None)
        weights = query.new_empty(rows, nodes, heads, splits, dtype=torch.float32)
        return cls(output, weights.new_empty(*weights.shape, size), weights)


class Blocks(NamedTuple):
    """The split of a call's work; numbers are powers of two, but for `stages`."""

    splits: int  # programs for the same rows: one has the tree, the others share the columns
    least: int  # columns of a share, of which short rows make fewer: each costs a part to write
    rows: int  # of a program, each a query head of a node; 16 or more
    columns: int  # of a step of its loop; 16 or more
    warps: int
    stages: int  # steps whose loads are under way at the same time


# What any device has room for.
SMALLEST = {"rows": 16, "columns": 16, "warps": 4, "stages": 1}


def tree_attention(
    query: torch.Tensor,  # [B, H, N, D]
    keys: torch.Tensor,  # [B, G, C, D] the cache
    values: torch.Tensor,  # [B, G, C, D]
    new_keys: torch.Tensor,  # [B, G, N, D]
    new_values: torch.Tensor,  # [B, G, N, D]
    lengths: torch.Tensor,  # [B] committed positions, which are the first columns
    ancestors: torch.Tensor,  # [B, N] int64, see `ancestor_bits`
    *,
    scale: float,
    first: torch.Tensor | None = None,  # [B, N] the first column that each node sees; else 0
    starts: torch.Tensor | None = None,  # [B] column of the tree's first node; else the length
    pending: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """The attention [B, N, H x D] of N nodes, whose keys and values go into the cache.

    A node sees the committed columns from `first` on, and the nodes of its bits: bit n is that of
    the node at column ``starts + n``. The first `pending` of these are in the cache already, those
    given follow them; they are 64 at most together. `softcap` limits scores as in Gemma 2, `sinks`
    are scores without a value as in gpt-oss. The dimension D, and the numbers of a row, lie side by
    side in memory; other numbers than `ancestors` may be int32. Nothing waits for the device, and
    `blocks` (else `blocks_for` the query) depend on no lengths, so the call can be recorded.
    """
    batch, heads, nodes, head_size = query.shape
    groups, width = keys.shape[1], max(next_power_of_2(head_size), 16)
    states = States(query, keys, values, new_keys, new_values)
    assert heads % groups == 0 and pending + nodes <= MOST_NODES and head_size <= WIDEST_HEAD
    assert keys.stride() == values.stride() and all(each.stride(3) == 1 for each in states)
    blocks = blocks or blocks_for(query, groups)
    group, starts = heads // groups, lengths if starts is None else starts
    tables = [(t, 0 if t is None else t.stride(0)) for t in (lengths, starts, ancestors, first)]
    outputs = Outputs.to(query, blocks.splits)
    given = (
        states,
        States(*(each.stride()[:3] for each in states)),  # type: ignore[arg-type]
        *chain.from_iterable(tables),
        sinks,
        outputs,
        scale * LOG2_E.value if softcap is None else scale / softcap,
        None if softcap is None else softcap * LOG2_E.value,
        *(nodes, pending or None, heads, group, head_size, width),
    )
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _attend(blocks, batch * groups, nodes * group, given)
        if blocks.splits > 1:
            sizes = head_size, width, blocks.splits
            warps = max(blocks.splits * width // 2048, 1)
            merge[(batch * nodes * heads,)](*outputs, *sizes, num_warps=warps)
    return outputs.output.flatten(2)


def _attend(blocks: Blocks, programs: int, rows: int, given: Sequence[object]) -> None:
    """Launch the first kernel for so many `rows` each; programs of any size leave the same parts.

    Where the device has no room for these blocks, it gets the smallest.
    """

    def launch(blocks: Blocks) -> None:
        attend[(programs, cdiv(rows, blocks.rows), blocks.splits)](
            *given, *blocks[:4], num_warps=blocks.warps, num_stages=blocks.stages
        )

    try:
        launch(blocks)
    except OutOfResources as error:
        warn_of_small_blocks(str(error))
        launch(blocks._replace(**SMALLEST))


@cache
def warn_of_small_blocks(reason: str) -> None:
    """Say once why attention takes longer than it should."""
    logger.warning("trees are attended to in small blocks, which is slower: %s", reason)


def ancestor_bits(visible: torch.Tensor) -> torch.Tensor:
    """The nodes of M <= 64 that each of N sees, bool [..., N, M], as bits of int64 [..., N].

    A node that sees nodes 0 and 2 has the number 5.
    """
    places = torch.arange(visible.shape[-1], device=visible.device)
    return (visible.long() << places).sum(-1)


def blocks_for(query: torch.Tensor, groups: int) -> Blocks:
    """The split of a call with a query [B, H, N, D] whose heads share G = `groups` of keys."""
    batch, heads, nodes, head_size = query.shape
    num_rows = nodes * heads // groups
    if query.dtype == torch.float32:  # whose products are sums of numbers in registers
        rows, columns, stages = 16, 16, 2
    else:
        rows = min(max(next_power_of_2(num_rows), 16), 64)
        columns, stages = min(2**13 // next_power_of_2(head_size), 64), 3
        # Keys and values of the steps that are under way, queries and weights. A chip that takes
        # up more for its products, an H100, has much more.
        width, size = next_power_of_2(head_size), query.element_size()
        needed = (2 * (stages - 1) * columns * width + rows * (width + columns)) * size
        if needed > shared_memory(query.device):
            stages = 2
    programs = batch * groups * cdiv(num_rows, rows)
    wanted = cdiv(PROGRAMS_EACH * multiprocessors(query.device), programs)
    splits = min(next_power_of_2(wanted), MOST_SPLITS)
    # Numbers that a program keeps in registers; the only one of its rows keeps more.
    kept = rows * next_power_of_2(head_size) * (2 if splits == 1 else 1)
    warps = 8 if kept > 2**13 else 4
    return Blocks(splits, max(2 * rows, columns), rows, columns, warps, stages)


def shared_memory(device: torch.device) -> float:
    """Bytes that a program on a device can share; an interpreter has no limit."""
    return max_shared_mem(device.index) if device.type == "cuda" else float("inf")


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; an interpreter runs one program after the other."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
