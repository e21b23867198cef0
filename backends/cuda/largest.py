"""The largest numbers of each row and where they are, in two launches.

torch's `topk` of one row of a vocabulary is some sixteen kernels, each as short as a kernel can be,
and a draft asks for it at every level. Here a number and its place are one integer, so that sorting
needs no second array: programs find the largest of each block, then one of each row those of all.
"""

import torch
import triton
import triton.language as tl

from drafthead.backends.cuda import MOST_LARGEST

WIDTH = 2048  # of a block
TOGETHER = 4096  # integers that one program sorts


@triton.jit
def _coded(numbers, places):  # type: ignore[no-untyped-def]
    """Integers in the order of the numbers, of equals the first place being the largest."""
    bits = numbers.to(tl.float32).to(tl.int32, bitcast=True)
    # Negative numbers have their bits in the opposite order.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit(do_not_specialize=["size"])
def _largest_of_blocks(numbers, stride, size, found, count: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of the largest numbers of one block of one row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = block * width + tl.arange(0, width)
    read = tl.load(numbers + row * stride + places, places < size, float("-inf"))
    best = tl.topk(_coded(read, places), count)
    first = (row * tl.num_programs(1) + block) * count
    tl.store(found + first + tl.arange(0, count), best)


@triton.jit(do_not_specialize=["size"])
def _largest_of_rows(  # type: ignore[no-untyped-def]
    found, size, numbers, places, wanted, count: tl.constexpr, width: tl.constexpr
):
    """The numbers and places of the largest of one row, from the codes of its blocks."""
    row, each = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    best = tl.topk(tl.load(found + row * size + each, each < size, -(2**63)), count)
    ordered = (best >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    each = tl.arange(0, count)
    tl.store(numbers + row * wanted + each, bits.to(tl.float32, bitcast=True), each < wanted)
    tl.store(places + row * wanted + each, 0x7FFFFFFF - (best & 0x7FFFFFFF), each < wanted)


@torch.library.custom_op("drafthead::largest", mutates_args=())
def largest(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` <= 64 largest of x [..., V] in float32, the largest first, and their places.

    Of equals the first are taken. The numbers of a row lie side by side, V is less than 2^31.
    """
    rows = x.reshape(-1, x.shape[-1])
    assert count <= MOST_LARGEST and count <= rows.shape[1]
    kept = max(2, triton.next_power_of_2(count))
    width = max(WIDTH, triton.next_power_of_2(triton.cdiv(rows.shape[1] * kept, TOGETHER)))
    blocks = triton.cdiv(rows.shape[1], width)
    found = torch.empty(len(rows), blocks * kept, dtype=torch.int64, device=x.device)
    numbers = torch.empty(*x.shape[:-1], count, dtype=torch.float32, device=x.device)
    places = torch.empty(*x.shape[:-1], count, dtype=torch.int64, device=x.device)
    together = triton.next_power_of_2(blocks * kept)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _largest_of_blocks[(len(rows), blocks)](
            rows, rows.stride(0), rows.shape[1], found, kept, width
        )
        _largest_of_rows[(len(rows),)](found, blocks * kept, numbers, places, count, kept, together)
    return numbers, places


@largest.register_fake
def _(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the right shape."""
    shape = *x.shape[:-1], count
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)
