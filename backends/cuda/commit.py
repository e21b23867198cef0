"""Moves the accepted nodes of a tree next to what their rows have committed, in one launch.

With 4 positions committed, a tree at columns 4 5 6 7 and the path (0, 2), columns 4 and 6 of every
layer's keys and values move to 4 and 5. How long paths are is read on the device.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# Columns that are read before any of them is written.
AT_ONCE = tl.constexpr(8)
WORD = 4  # bytes: states of any type are moved as words
FIELDS = tl.constexpr(6)  # of a row of the table


class CacheTable:
    """The addresses of all layers' keys and values, as numbers on their device.

    It is for the memory that a cache has now, not for that in which it goes on when it grows.
    """

    def __init__(self, states: Sequence[torch.Tensor]):
        """`states` are the keys and values [B, G, C, D] of all layers, on one device."""
        self.groups = max(layer.shape[1] for layer in states)
        self.words = max(words(layer, layer.shape[3]) for layer in states)
        fields = [fields_of(layer) for layer in states]
        self.numbers = torch.tensor(fields, device=states[0].device)  # [layers, FIELDS]


def fields_of(states: torch.Tensor) -> tuple[int, ...]:
    """Address, heads, words of a head, and between rows, heads and columns, of [B, G, S, D]."""
    assert states.stride(3) == 1
    sizes = (states.shape[3], *states.stride()[:3])
    return states.data_ptr(), states.shape[1], *(words(states, size) for size in sizes)


def words(states: torch.Tensor, count: int) -> int:
    """The number of words of that many numbers of a tensor [...]."""
    assert count * states.element_size() % WORD == 0
    return count * states.element_size() // WORD


@triton.jit(do_not_specialize_on_alignment=["path", "accepted", "lengths", "starts"])
def _move(  # type: ignore[no-untyped-def]
    table,
    path,  # [B, P]
    accepted,  # [B]
    lengths,  # [B]
    starts,  # [B]
    strides,  # of these four
    width: tl.constexpr,
):
    """The moves in one head of one row, of the keys or the values of one layer.

    A path increases, so its nodes move to lower columns, and no column is written that is still to
    be read, but for those that are read at once.
    """
    entry = table + tl.program_id(0) * FIELDS
    b, g = tl.program_id(1).to(tl.int64), tl.program_id(2)
    if g < tl.load(entry + 1):
        between = tl.load(entry + 5)
        head = tl.load(entry).to(tl.pointer_type(tl.int32))
        head += b * tl.load(entry + 3) + g * tl.load(entry + 4) + tl.arange(0, width)[None, :]
        in_head = (tl.arange(0, width) < tl.load(entry + 2))[None, :]
        count = tl.load(accepted + b * strides[1]).to(tl.int32)
        length = tl.load(lengths + b * strides[2])
        start = tl.load(starts + b * strides[3])
        for at in range(0, count, AT_ONCE):
            step = at + tl.arange(0, AT_ONCE)
            node = tl.load(path + b * strides[0][0] + step * strides[0][1], step < count, 0)
            source, target = start + node, length + step
            moves = ((step < count) & (source != target))[:, None] & in_head
            states = tl.load(head + source[:, None] * between, moves)
            tl.debug_barrier()  # a column may be the source of one and the target of another
            tl.store(head + target[:, None] * between, states, moves)


def commit(
    table: CacheTable,
    path: torch.Tensor,  # [B, P] accepted nodes in order; the rest of a row is ignored
    accepted: torch.Tensor,  # [B] their number
    lengths: torch.Tensor,  # [B] positions committed before
    starts: torch.Tensor | None = None,  # [B] column of the tree's first node; else the length
) -> None:
    """Move column ``starts + path[i]`` of each row to ``lengths + i``, in all layers.

    Numbers are of any integer type, and a path increases. Nothing waits for the device.
    """
    given = path, accepted, lengths, lengths if starts is None else starts
    grid = len(table.numbers), path.shape[0], table.groups
    width = triton.next_power_of_2(table.words)
    with torch.cuda.device_of(path):  # Triton launches on the current device
        _move[grid](
            table.numbers, *given, (path.stride(), *(t.stride(0) for t in given[1:])), width,
            num_warps=1,
        )  # fmt: skip
