"""Attention of a token tree and of all that its rows have committed, as two CUDA kernels.

Everything that differs from step to step is read on the device, so one recording serves all lengths.
Of a row with 5 committed positions, of which node n may not see the first two (a window, say)::

    columns of the cache       0 1 2 3 4 | start ...
    seen by node n             . . # # # | as the bits of ancestors[n] say

The tree's own keys and values come as the pass made them; the kernel also writes them into the
cache. Query heads that share keys are rows of one product, so that no key is read twice for them.
The committed columns are split among programs; one more program has the tree, and a second kernel
puts the parts together.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Nodes whose ancestors fit into the bits of one number, and the widest heads that were compiled.
MOST_NODES = 64
WIDEST_HEAD = 256
MOST_SPLITS = 64
# Programs that a multiprocessor should have, so that one computes while another waits for memory.
PROGRAMS_EACH = 2
# Of an H100, where there is no device to ask: kernels are interpreted or only compiled.
MULTIPROCESSORS = 132

LOG2_E = tl.constexpr(math.log2(math.e))
# Less than any score, but finite: the difference of two is 0, and that of infinities is not.
LOWEST = tl.constexpr(-1e30)


class Blocks(NamedTuple):
    """How the work of one call is cut up."""

    splits: int  # programs a head: one has the tree, the others share the committed columns
    rows: int  # query heads x nodes of a program, a power of two from 16 on
    columns: int  # of a step of its loop, likewise
    warps: int
    stages: int  # steps whose loads are under way at the same time


@triton.jit
def _fold_in(best, total, mean, query, keys, values, seen, scale, cap):  # type: ignore[no-untyped-def]
    """The running softmax of each row with a block of keys and values more.

    `best` is the highest score so far, `total` the sum of weights relative to it, `mean` that of
    weighted values. Scores are logarithms to the base of two.
    """
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if cap is not None:  # cap x tanh(scores), of which Triton's interpreter has no function
        scores = cap - 2 * cap / (1 + tl.exp2(scores * (2 * LOG2_E)))
    scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - new_best[:, None])
    fade = tl.exp2(best - new_best)
    mean = tl.dot(weights.to(values.dtype), values, mean * fade[:, None], input_precision="ieee")
    return new_best, total * fade + tl.sum(weights, 1), mean


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query,  # [B, H, N, D]
    keys,  # [B, G, C, D], as are the values
    values,
    new_keys,  # [B, G, N, D]
    new_values,  # [B, G, N, D]
    lengths,  # [B]
    starts,  # [B] or None
    first,  # [B, N] or None
    ancestors,  # [B, N]
    sinks,  # [H] or None
    parts,  # [B, N, H, splits, D], unless there is one split
    weights,  # [B, N, H, splits]
    output,  # [B, N, H, D]
    query_strides,
    cache_strides,
    new_key_strides,
    new_value_strides,
    row_strides,  # of lengths and of starts
    first_strides,
    ancestor_strides,
    scale,
    cap,  # or None
    nodes,
    pending,  # or None
    heads,
    group: tl.constexpr,  # query heads that share keys
    head_size: tl.constexpr,
    width: tl.constexpr,  # the next power of two
    splits: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Row m of a program is query head m % group, of those that share its keys, of node m // group."""
    of_group = tl.program_id(0) % (heads // group)
    b = (tl.program_id(0) // (heads // group)).to(tl.int64)
    split = tl.program_id(2)
    m = tl.program_id(1) * rows + tl.arange(0, rows)
    node, head, is_row = m // group, of_group * group + m % group, m < nodes * group
    d = tl.arange(0, width)[None, :]
    in_head = d < head_size
    place = (head * query_strides[1] + node * query_strides[2])[:, None] + d
    q = tl.load(query + b * query_strides[0] + place, is_row[:, None] & in_head, 0.0)
    keys += b * cache_strides[0] + of_group * cache_strides[1]
    values += b * cache_strides[0] + of_group * cache_strides[1]
    length = tl.load(lengths + b * row_strides[0]).to(tl.int32)

    best = tl.full([rows], LOWEST, tl.float32)
    total = tl.zeros([rows], tl.float32)
    mean = tl.zeros([rows, width], tl.float32)
    if sinks is not None:  # a score of no value, which is counted once
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        best = tl.where(split == 0, sink, best)
        total = tl.where(split == 0, 1.0, total)
    lowest = length * 0
    if first is not None:
        begins = first + b * first_strides[0] + node * first_strides[1]
        begin = tl.load(begins, is_row, 1 << 30).to(tl.int32)
        lowest = tl.minimum(tl.maximum(tl.min(begin, 0), 0), length)
    if splits == 1:
        left, right = lowest, length
    else:  # split 0 has the tree
        share = tl.cdiv(tl.cdiv(length - lowest, splits - 1), columns) * columns
        left = lowest + (split - 1) * share
        right = tl.where(split == 0, left, tl.minimum(left + share, length))

    for at in range(left, right, columns):
        c = at + tl.arange(0, columns)
        cells = c[:, None] * cache_strides[2] + d
        is_key = (c < right)[:, None] & in_head
        k = tl.load(keys + cells, is_key, 0.0)
        v = tl.load(values + cells, is_key, 0.0)
        seen = (c < right)[None, :]
        if first is not None:
            seen = seen & (c[None, :] >= begin[:, None])
        best, total, mean = _fold_in(best, total, mean, q, k, v, seen, scale, cap)

    if split == 0:
        bits = ancestors + b * ancestor_strides[0] + node * ancestor_strides[1]
        bits = tl.load(bits, is_row, 0)
        new_keys += b * new_key_strides[0] + of_group * new_key_strides[1]
        new_values += b * new_value_strides[0] + of_group * new_value_strides[1]
        start = length
        if starts is not None:
            start = tl.load(starts + b * row_strides[1]).to(tl.int32)
        last = 0 if pending is None else pending
        for at in range(0, last + nodes, columns):
            c = at + tl.arange(0, columns)
            is_key = (c < last + nodes)[:, None] & in_head
            key_at = new_keys + (c - last)[:, None] * new_key_strides[2] + d
            value_at = new_values + (c - last)[:, None] * new_value_strides[2] + d
            if pending is not None:
                cells = (start + c)[:, None] * cache_strides[2] + d
                key_at = tl.where((c < last)[:, None], keys + cells, key_at)
                value_at = tl.where((c < last)[:, None], values + cells, value_at)
            k = tl.load(key_at, is_key, 0.0)
            v = tl.load(value_at, is_key, 0.0)
            seen = (bits[:, None] >> tl.minimum(c, 63).to(tl.int64)[None, :]) & 1
            seen = (seen != 0) & (c < last + nodes)[None, :]
            best, total, mean = _fold_in(best, total, mean, q, k, v, seen, scale, cap)
        if tl.program_id(1) == 0:  # nobody reads these columns in this pass
            for at in range(0, nodes, 16):
                n = at + tl.arange(0, 16)
                is_new = (n < nodes)[:, None] & in_head
                cells = (start + last + n)[:, None] * cache_strides[2] + d
                k = tl.load(new_keys + n[:, None] * new_key_strides[2] + d, is_new)
                v = tl.load(new_values + n[:, None] * new_value_strides[2] + d, is_new)
                tl.store(keys + cells, k, is_new)
                tl.store(values + cells, v, is_new)

    sees = total > 0  # a node that only fills up a tree may see nothing
    mean = mean / tl.where(sees, total, 1.0)[:, None]
    part = (b * nodes + node) * heads + head
    if splits == 1:
        written = is_row[:, None] & in_head
        tl.store(output + part[:, None] * head_size + d, mean.to(output.dtype.element_ty), written)
    else:
        part = part * splits + split
        tl.store(parts + part[:, None] * head_size + d, mean, (is_row & sees)[:, None] & in_head)
        weight = tl.where(sees, best + tl.log2(tl.where(sees, total, 1.0)), float("-inf"))
        tl.store(weights + part, weight, is_row)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    parts,  # [B, N, H, splits, D]
    weights,  # [B, N, H, splits], as logarithms
    output,  # [B, N, H, D]
    head_size: tl.constexpr,
    width: tl.constexpr,
    splits: tl.constexpr,
):
    """One query head of one node from its parts; parts of weight 0 were not written."""
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, splits), tl.arange(0, width)
    weight = tl.load(weights + row * splits + s)
    best = tl.maximum(tl.max(weight, 0), LOWEST)
    weight = tl.exp2(weight - best)
    wanted = (weight > 0)[:, None] & (d < head_size)[None, :]
    part = tl.load(parts + (row * splits + s)[:, None] * head_size + d[None, :], wanted, 0.0)
    total = tl.sum(weight, 0)
    mean = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + row * head_size + d, mean.to(output.dtype.element_ty), d < head_size)


def tree_attention(
    query: torch.Tensor,  # [B, H, N, D]
    keys: torch.Tensor,  # [B, G, C, D] the cache, of any strides but that of D
    values: torch.Tensor,  # as keys, with the same strides
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

    A node sees the committed columns from `first` on, and the nodes of its bits. The first `pending`
    of the tree's nodes are in the cache already, those given follow them: bit n is that of column
    ``starts + n``, and `pending` + N are at most 64. `softcap` limits scores (Gemma 2), `sinks` are
    scores of no value (gpt-oss). Integers may be of any type; nothing waits for the device.
    `blocks` are `blocks_for` this call, unless given.
    """
    rows, heads, nodes, head_size = query.shape
    groups, width = keys.shape[1], triton.next_power_of_2(head_size)
    assert heads % groups == 0 and pending + nodes <= MOST_NODES and head_size <= WIDEST_HEAD
    assert keys.stride() == values.stride() and keys.stride(3) == new_keys.stride(3) == 1
    assert query.stride(3) == new_values.stride(3) == 1
    blocks = blocks or blocks_for(query, groups)
    output = query.new_empty(rows, nodes, heads * head_size)
    parts = weights = None
    if blocks.splits > 1:
        weights = query.new_empty(rows, nodes, heads, blocks.splits, dtype=torch.float32)
        parts = weights.new_empty(*weights.shape, head_size)
    of_scores = scale * LOG2_E.value if softcap is None else scale / softcap
    group = heads // groups
    grid = (rows * groups, triton.cdiv(nodes * group, blocks.rows), blocks.splits)
    tensors = query, keys, values, new_keys, new_values, lengths, starts, first, ancestors, sinks
    _attend[grid](
        *(*tensors, parts, weights, output),
        *(t.stride()[:3] for t in (query, keys, new_keys, new_values)),
        (lengths.stride(0), 0 if starts is None else starts.stride(0)),
        (0, 0) if first is None else first.stride(),
        ancestors.stride(),
        of_scores,
        None if softcap is None else softcap * LOG2_E.value,
        nodes,
        pending or None,
        heads,
        group,
        head_size,
        max(width, 16),
        blocks.splits,
        blocks.rows,
        blocks.columns,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    if blocks.splits > 1:
        _merge[(rows * nodes * heads,)](
            parts, weights, output, head_size, width, blocks.splits, num_warps=2
        )
    return output


def ancestor_bits(visible: torch.Tensor) -> torch.Tensor:
    """Which of M <= 64 nodes each of N sees, bool [..., N, M], as bits of int64 [..., N].

    A node that sees nodes 0 and 2 has the number 5.
    """
    places = torch.arange(visible.shape[-1], device=visible.device)
    return (visible.long() << places).sum(-1)


def blocks_for(query: torch.Tensor, groups: int) -> Blocks:
    """How a call with the query [B, H, N, D] is cut up, whose heads share keys in groups.

    It depends on shapes alone, never on lengths, so that a recorded call keeps it.
    """
    batch, heads, nodes, head_size = query.shape
    num_rows = nodes * heads // groups
    rows = min(max(triton.next_power_of_2(num_rows), 16), 64)
    key_bytes = triton.next_power_of_2(head_size) * query.element_size()
    columns = min(max(2**14 // key_bytes, 16), 64)
    programs = batch * groups * triton.cdiv(num_rows, rows)
    wanted = triton.cdiv(PROGRAMS_EACH * multiprocessors(query.device), programs)
    splits = min(triton.next_power_of_2(wanted), MOST_SPLITS)
    return Blocks(splits, rows, columns, warps=4, stages=3)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
