"""The two kernels of tree attention: programs that each take a share of the keys, and their merge.

A program has some rows, which are query heads that share keys, of some nodes. It goes through its
keys in blocks and carries a running softmax of each row: the highest score so far, the sum of
weights relative to it, and the sum of weighted values. Scores are logarithms to the base of two.
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
# Less than any score, but finite: the difference of two is 0, and that of infinities is not.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _fold_in(softmax, query, keys, values, seen, scale, cap):  # type: ignore[no-untyped-def]
    """The running softmax with a block of keys and values, of which each row sees some."""
    best, total, mixed = softmax
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if cap is not None:  # cap x tanh(scores), for which Triton's interpreter has no function
        scores = cap - 2 * cap / (1 + tl.exp2(scores * (2 * LOG2_E)))
    scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - new_best[:, None])
    fade = tl.exp2(best - new_best)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
    return new_best, total * fade + tl.sum(weights, 1), mixed


@triton.jit
def _with_committed(  # type: ignore[no-untyped-def]
    softmax,
    query,  # [rows, width]
    keys,  # of one head
    values,
    stride,  # of their columns
    begin,  # [rows] the first column that each row sees, or None
    left,
    right,
    scale,
    cap,
    head_size: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
):
    """The running softmax with the committed columns from `left` to `right`."""
    d = tl.arange(0, width)[None, :]
    for at in range(left, right, columns):
        c = at + tl.arange(0, columns)
        cells = c[:, None] * stride + d
        is_cell = (c < right)[:, None] & (d < head_size)
        k = tl.load(keys + cells, is_cell, 0.0)
        v = tl.load(values + cells, is_cell, 0.0)
        seen = (c < right)[None, :]
        if begin is not None:
            seen = seen & (c[None, :] >= begin[:, None])
        softmax = _fold_in(softmax, query, k, v, seen, scale, cap)
    return softmax


@triton.jit
def _with_tree(  # type: ignore[no-untyped-def]
    softmax,
    query,  # [rows, width]
    bits,  # [rows] the nodes that each row sees
    new_keys,  # of one head
    new_values,
    keys,  # of the cache, from the tree's first column on
    values,
    strides,
    nodes,
    pending,
    scale,
    cap,
    head_size: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
):
    """The running softmax with the tree, whose pending nodes are in the cache."""
    d = tl.arange(0, width)[None, :]
    before = 0 if pending is None else pending
    for at in range(0, before + nodes, columns):
        c = at + tl.arange(0, columns)
        is_node = c < before + nodes
        key_at = new_keys + (c - before)[:, None] * strides.new_keys[2] + d
        value_at = new_values + (c - before)[:, None] * strides.new_values[2] + d
        if pending is not None:
            in_cache = (c < before)[:, None]
            cells = c[:, None] * strides.key_cache[2] + d
            key_at = tl.where(in_cache, keys + cells, key_at)
            value_at = tl.where(in_cache, values + cells, value_at)
        k = tl.load(key_at, is_node[:, None] & (d < head_size), 0.0)
        v = tl.load(value_at, is_node[:, None] & (d < head_size), 0.0)
        bit = (bits[:, None] >> tl.minimum(c, 63).to(tl.int64)[None, :]) & 1
        seen = (bit != 0) & is_node[None, :]
        softmax = _fold_in(softmax, query, k, v, seen, scale, cap)
    return softmax


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    new_keys,  # of one head
    new_values,
    keys,  # of the cache
    values,
    start,  # of the first new node there
    strides,
    nodes,
    head_size: tl.constexpr,
    width: tl.constexpr,
):
    """Write the keys and values of new nodes into the cache."""
    d = tl.arange(0, width)[None, :]
    for at in range(0, nodes, 16):
        n = (at + tl.arange(0, 16))[:, None]
        is_node = (n < nodes) & (d < head_size)
        k = tl.load(new_keys + n * strides.new_keys[2] + d, is_node)
        v = tl.load(new_values + n * strides.new_values[2] + d, is_node)
        cells = start + n * strides.key_cache[2] + d
        tl.store(keys + cells, k, is_node)
        tl.store(values + cells, v, is_node)


@triton.jit
def _share_of(  # type: ignore[no-untyped-def]
    split, splits: tl.constexpr, lowest, length, least: tl.constexpr, columns: tl.constexpr
):
    """The committed columns that a split takes: none where split 0 has the tree alone."""
    if splits == 1:
        left, right = lowest, length
    else:
        share = tl.cdiv(tl.cdiv(length - lowest, splits - 1), columns) * columns
        share = tl.maximum(share, least)
        left = lowest + (split - 1) * share
        right = tl.where(split == 0, left, tl.minimum(left + share, length))
    return left, right


@triton.jit
def _begun(sinks, head, split, rows: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """The running softmax before the first key; a sink is a score of no value, counted once."""
    best, total = tl.full([rows], LOWEST, tl.float32), tl.zeros([rows], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        best, total = tl.where(split == 0, sink, best), tl.where(split == 0, 1.0, total)
    return best, total, tl.zeros([rows, width], tl.float32)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    softmax,
    outputs,  # `Outputs`
    row,  # [rows] their places in the output
    split,
    is_row,
    head_size: tl.constexpr,
    width: tl.constexpr,
    splits: tl.constexpr,
):
    """Write what a split found, for `merge`; what the only one found is the output."""
    best, total, mixed = softmax
    d = tl.arange(0, width)[None, :]
    sees = is_row & (total > 0)  # a node that only fills up a tree may see nothing
    safe = tl.where(sees, total, 1.0)
    mean = mixed / safe[:, None]
    if splits == 1:
        is_value = is_row[:, None] & (d < head_size)
        tl.store(outputs.output + row[:, None] * head_size + d, mean, is_value)
    else:
        place = row * splits + split
        tl.store(
            outputs.parts + place[:, None] * head_size + d, mean, sees[:, None] & (d < head_size)
        )
        weight = tl.where(sees, best + tl.log2(safe), float("-inf"))
        tl.store(outputs.weights + place, weight, is_row)


@triton.jit
def _first_columns(first, stride, b, node, is_row, length):  # type: ignore[no-untyped-def]
    """The first column that each row sees, and the lowest of these; 0 without `first`."""
    if first is None:
        begin, lowest = length * 0, length * 0
    else:
        begin = tl.load(first + b * stride + node, is_row, 1 << 30).to(tl.int32)
        lowest = tl.minimum(tl.maximum(tl.min(begin, 0), 0), length)
    return begin, lowest


# What differs between calls that are alike must not make Triton compile one more kernel.
VARIABLE = ["length_stride", "start_stride", "ancestor_stride", "first_stride"]
TABLES = ["lengths", "starts", "ancestors", "first"]


@triton.jit(
    do_not_specialize=[*VARIABLE, "nodes", "pending", "heads"],
    do_not_specialize_on_alignment=TABLES,
)
def attend(  # type: ignore[no-untyped-def]
    states,  # `States`
    strides,  # of each of them
    lengths,  # [B]
    length_stride,
    starts,  # [B]
    start_stride,
    ancestors,  # [B, N]
    ancestor_stride,
    first,  # [B, N] or None
    first_stride,
    sinks,  # [H] or None
    outputs,  # `Outputs`
    scale,
    cap,  # or None
    nodes,
    pending,  # or None
    heads,
    group: tl.constexpr,  # query heads that share keys
    head_size: tl.constexpr,
    width: tl.constexpr,  # a power of two that is no smaller
    splits: tl.constexpr,
    least: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Row m is query head ``m % group``, of those that share keys, of node ``m // group``."""
    g, split = tl.program_id(0) % (heads // group), tl.program_id(2)
    b = (tl.program_id(0) // (heads // group)).to(tl.int64)
    m = tl.program_id(1) * rows + tl.arange(0, rows)
    node, head, is_row = m // group, g * group + m % group, m < nodes * group
    d = tl.arange(0, width)[None, :]
    is_value = is_row[:, None] & (d < head_size)
    in_query = (head * strides.query[1] + node * strides.query[2])[:, None] + d
    query = tl.load(states.query + b * strides.query[0] + in_query, is_value, 0.0)
    length = tl.load(lengths + b * length_stride).to(tl.int32)
    begin, lowest = _first_columns(first, first_stride, b, node, is_row, length)
    left, right = _share_of(split, splits, lowest, length, least, columns)
    softmax = _begun(sinks, head, split, rows, width)
    cell = b * strides.key_cache[0] + g * strides.key_cache[1]
    keys, values, stride = states.key_cache + cell, states.value_cache + cell, strides.key_cache[2]
    softmax = _with_committed(
        softmax, query, keys, values, stride, None if first is None else begin, left, right,
        scale, cap, head_size, width, columns,
    )  # fmt: skip
    if split == 0:
        bits = tl.load(ancestors + b * ancestor_stride + node, is_row, 0)
        start = tl.load(starts + b * start_stride) * stride
        new_keys = states.new_keys + b * strides.new_keys[0] + g * strides.new_keys[1]
        new_values = states.new_values + b * strides.new_values[0] + g * strides.new_values[1]
        softmax = _with_tree(
            softmax, query, bits, new_keys, new_values, keys + start, values + start, strides,
            nodes, pending, scale, cap, head_size, width, columns,
        )  # fmt: skip
        if tl.program_id(1) == 0:  # nobody reads these columns in this pass
            start += (0 if pending is None else pending) * stride
            _store(new_keys, new_values, keys, values, start, strides, nodes, head_size, width)
    row = (b * nodes + node) * heads + head
    _finish(softmax, outputs, row, split, is_row, head_size, width, splits)


@triton.jit
def merge(  # type: ignore[no-untyped-def]
    output,  # [B, N, H, D]
    parts,  # [B, N, H, splits, D]
    weights,  # [B, N, H, splits], as logarithms
    head_size: tl.constexpr,
    width: tl.constexpr,
    splits: tl.constexpr,
):
    """One query head of one node from its parts; parts of no weight were not written."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, width)
    place = row * splits + tl.arange(0, splits)
    weight = tl.load(weights + place)
    weight = tl.exp2(weight - tl.maximum(tl.max(weight, 0), LOWEST))
    wanted = (weight > 0)[:, None] & (d < head_size)[None, :]
    part = tl.load(parts + place[:, None] * head_size + d[None, :], wanted, 0.0)
    total = tl.sum(weight, 0)
    mean = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + row * head_size + d, mean.to(output.dtype.element_ty), d < head_size)
