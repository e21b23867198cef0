"""Draws from what top-k, top-p and min-p leave, without sorting a vocabulary: one launch.

The filters keep the first tokens of an order: the most probable first, of equals the lower number.
So a token is kept if few enough, and little enough mass, come before it, which one reading of the
row tells; and where it is not, nothing after it is either. One program a row takes the token that
wins the race of all, and as long as that is not kept, the winner of those before it: the last is
the winner of those that are kept. A reading that weighs one winner also finds the next, and the
winner of all is kept with a chance of top-p or more: two or three readings are usual.

Where top-p counts the mass of what top-k leaves, that is found first: the bits of the least logit
that it keeps, from the highest on, by counting the logits that are as large.
"""

import torch
import triton
import triton.language as tl

from drafthead.core import sampling
from drafthead.core.sampling import NO_TOKEN, arrival_times

WIDTH, WARPS = 8192, 16  # numbers that one program reads together
ZEROS = {torch.bfloat16: 16, torch.float16: 13}  # lowest bits that say nothing, as float32


@triton.jit
def _ordered(logits, places, size):  # type: ignore[no-untyped-def]
    """Logits, and integers in their order; -inf after the last."""
    # -0 plus 0 is 0: neither comes first.
    read = tl.load(logits + places, places < size, float("-inf")).to(tl.float32) + 0.0
    bits = read.to(tl.int32, bitcast=True)
    # Negative numbers have their bits in the opposite order.
    return read, bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _least_of(logits, size, top_k, zeros: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """An integer that exactly the `top_k` largest logits reach, and equals of the last of them."""
    least, one = tl.full([], -(2**31), tl.int32), tl.full([], 1, tl.int32)
    bit, reached = 31, size
    while (bit >= zeros) & (reached != top_k):
        trial = least ^ (one << bit)  # the highest bit is the sign
        count = tl.zeros([width], tl.int32)
        for start in range(0, size, width):
            _, code = _ordered(logits, start + tl.arange(0, width), size)
            count += (code >= trial).to(tl.int32)
        found = tl.sum(count)
        if found >= top_k:
            least, reached = trial, found
        bit -= 1
    return least


@triton.jit
def _first_kept(  # type: ignore[no-untyped-def]
    logits, stride, largest, speeds, settings, nodes, tokens, size,
    zeros: tl.constexpr, no_token: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """The token of one row, see `first_kept`."""
    row = tl.program_id(0).to(tl.int64)
    logits, speeds = logits + row * stride, speeds + row * size
    settings += row // nodes * 4
    temperature, top_k = tl.load(settings), tl.load(settings + 1).to(tl.int32)
    top_p, min_p = tl.load(settings + 2), tl.load(settings + 3)
    top = tl.load(largest + row)
    token = no_token
    if (top > float("-inf")) & (top < float("inf")):  # neither holds for NaN
        bound = -(2**31)
        if top_k < size:
            bound = _least_of(logits, size, top_k, zeros, width)
        # At first no token is weighed: all that top-k keeps come before the end of the row.
        token, mass, whole, is_on = size, 0.0, 0.0, True
        while is_on:
            above, first = tl.zeros([width], tl.float32), tl.zeros([width], tl.int64)
            for start in range(0, size, width):
                places = start + tl.arange(0, width)
                read, code = _ordered(logits, places, size)
                before = (code > bound) | ((code == bound) & (places < token))
                above += tl.where(before, tl.exp((read - top) / temperature), 0.0)
                # A speed is never negative, so its bits have its order; of equals the first place.
                speed = tl.load(speeds + places, places < size, 0.0).to(tl.int32, bitcast=True)
                coded = (speed.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)
                first = tl.maximum(first, tl.where(before, coded, 0))
            sum_above = tl.sum(above)
            if token == size:
                whole = sum_above
            is_on = (token == size) | (sum_above >= top_p * whole) | (mass < min_p)
            if is_on:
                token = 0x7FFFFFFF - (tl.max(first) & 0x7FFFFFFF).to(tl.int32)
                read, bound = _ordered(logits, token, size)
                mass = tl.exp((read - top) / temperature)
    tl.store(tokens + row, token)


@torch.library.custom_op("drafthead::first_kept", mutates_args=())
def first_kept(
    logits: torch.Tensor, largest: torch.Tensor, speeds: torch.Tensor, settings: torch.Tensor
) -> torch.Tensor:
    """The token [B, N] of logits [B, N, V] that arrives first of those that `settings` [B, 4] keep.

    `largest` [B, N, 1] are the largest logits and `speeds` [B, N, V] the masses of tokens over
    their arrival times, both float32. Where a logit is NaN, or the largest infinite, there is
    NO_TOKEN.
    """
    rows, speeds = logits.reshape(-1, logits.shape[-1]), speeds.contiguous()
    tokens = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _first_kept[(len(rows),)](
            rows, rows.stride(0), largest.contiguous(), speeds, settings.contiguous(),
            logits.shape[1], tokens, rows.shape[1],
            ZEROS.get(logits.dtype, 0), NO_TOKEN, WIDTH, num_warps=WARPS,
        )  # fmt: skip
    return tokens


@first_kept.register_fake
def _(
    logits: torch.Tensor, largest: torch.Tensor, speeds: torch.Tensor, settings: torch.Tensor
) -> torch.Tensor:
    """An output of the right shape."""
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


def draw(
    logits: torch.Tensor,  # [B, N, V]
    keys: torch.Tensor,  # [B, N] of the races
    settings: torch.Tensor,  # [B, 4], see `SamplingConfig.settings`
    filtered: bool,  # whether any row's settings are more than a temperature
) -> torch.Tensor:
    """The target's own token [B, N] after each node, as `sampling.draw` has it; none is sorted."""
    if not filtered:
        return sampling.draw(logits, keys, settings, filtered)
    scores = logits.float()
    largest = scores.amax(-1, keepdim=True)
    times = arrival_times(keys, torch.arange(logits.shape[-1], device=logits.device))
    speeds = ((scores - largest) / settings[:, 0, None, None]).exp() / times
    drawn: torch.Tensor = torch.ops.drafthead.first_kept(logits, largest, speeds, settings)
    return drawn
