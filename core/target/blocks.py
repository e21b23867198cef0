"""Weights of 4 to 8 bits in blocks, as GGUF files hold them, and their products.

A block holds whole numbers with a scale for each group of them, some with a minimum: a weight is
scale * number - minimum. Products round their inputs to eight bits as well, with a scale for each
block: sums within one are exact, blocks are added in order, and no row depends on another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

LEVELS = 127  # of inputs, on either side of 0
GROUP = 32  # weights of the smallest blocks
ROWS = 128  # that are in float32 at a time
LEAST = 1e-30  # a group of smaller inputs is all zeros


class Parts(NamedTuple):
    """The contents of blocks: weights scale * number - minimum; a group shares both."""

    numbers: torch.Tensor  # [..., K] int8
    scales: torch.Tensor  # [..., K / group] float32
    minima: torch.Tensor | None = None  # as scales
    factors: torch.Tensor | None = None  # [..., K / block] float32: scales are whole multiples


class Kind(NamedTuple):
    """A form of blocks: how many values one has, in how many bytes, and how they are read."""

    values: int
    bytes: int
    parts: Callable[[torch.Tensor], Parts]  # of blocks [..., bytes]


def halves(raw: torch.Tensor) -> torch.Tensor:
    """Bytes [..., 2 n] read as numbers of 16 bits, [..., n] float32."""
    return raw.contiguous().view(torch.float16).float()


def bits_of(raw: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Of each `count` bytes [..., n] the lowest `size` bits, then the next: [..., 8 n / size]."""
    places = torch.arange(0, 8, size, dtype=torch.uint8)[:, None]
    return (raw.unflatten(-1, (-1, 1, count)) >> places & (1 << size) - 1).flatten(-3)


def q4_0(raw: torch.Tensor) -> Parts:
    """Parts of Q4_0 [..., 18]: a scale and 32 numbers from -8."""
    return Parts(bits_of(raw[..., 2:], 4, 16).char() - 8, halves(raw[..., :2]))


def q4_1(raw: torch.Tensor) -> Parts:
    """Parts of Q4_1 [..., 20]: a scale, what is added, and 32 numbers from 0."""
    scales, added = halves(raw[..., :4]).split(1, dim=-1)
    return Parts(bits_of(raw[..., 4:], 4, 16).char(), scales, -added)


def q5_0(raw: torch.Tensor) -> Parts:
    """Parts of Q5_0 [..., 22]: a scale, fifth bits of 32 numbers from -16, their other bits."""
    numbers = bits_of(raw[..., 6:], 4, 16) | bits_of(raw[..., 2:6], 1, 1) << 4
    return Parts(numbers.char() - 16, halves(raw[..., :2]))


def q8_0(raw: torch.Tensor) -> Parts:
    """Parts of Q8_0 [..., 34]: a scale and 32 numbers with a sign."""
    return Parts(raw[..., 2:].view(torch.int8), halves(raw[..., :2]))


def k_scales(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and minima [..., 8] of blocks [..., 16], and the scales' factors [..., 1].

    Of the six bits of scales 4 to 7, the upper two are those of the bytes of 0 to 3.
    """
    factors, packed = halves(raw[..., :4]), raw[..., 4:]
    first, last = packed[..., :8], packed[..., 8:]
    upper = first >> 2 & 48
    scales = torch.cat([first[..., :4] & 63, last & 15 | upper[..., :4]], dim=-1)
    minima = torch.cat([first[..., 4:] & 63, last >> 4 | upper[..., 4:]], dim=-1)
    return factors[..., :1] * scales, factors[..., 1:] * minima, factors[..., :1]


def q4_k(raw: torch.Tensor) -> Parts:
    """Parts of Q4_K [..., 144]: eight groups of 32 numbers from 0."""
    return Parts(bits_of(raw[..., 16:], 4, 32).char(), *k_scales(raw[..., :16]))


def q5_k(raw: torch.Tensor) -> Parts:
    """Parts of Q5_K [..., 176]: as Q4_K, with the fifth bits before the others."""
    numbers = bits_of(raw[..., 48:], 4, 32) | bits_of(raw[..., 16:48], 1, 32) << 4
    return Parts(numbers.char(), *k_scales(raw[..., :16]))


def q6_k(raw: torch.Tensor) -> Parts:
    """Parts of Q6_K [..., 210]: lower four bits, upper two, 16 scales, and their factor."""
    numbers = bits_of(raw[..., :128], 4, 64) | bits_of(raw[..., 128:192], 2, 32) << 4
    factors = halves(raw[..., 208:])
    return Parts(numbers.char() - 32, factors * raw[..., 192:208].view(torch.int8), None, factors)


KINDS = {
    "Q4_0": Kind(32, 18, q4_0),
    "Q4_1": Kind(32, 20, q4_1),
    "Q5_0": Kind(32, 22, q5_0),
    "Q8_0": Kind(32, 34, q8_0),
    "Q4_K": Kind(256, 144, q4_k),
    "Q5_K": Kind(256, 176, q5_k),
    "Q6_K": Kind(256, 210, q6_k),
}


def as_q4_1(groups: torch.Tensor) -> torch.Tensor:
    """Blocks [..., 20] of Q4_1 of values [..., 32], with the scales that fit their numbers best."""
    least, most = groups.aminmax(dim=-1, keepdim=True)
    scales = (most - least).clamp_min(LEAST) / 15
    numbers = ((groups - least) / scales).round()
    means, around = (part.mean(-1, keepdim=True) for part in (groups, numbers))
    away = numbers - around
    fit = (away * (groups - means)).sum(-1, keepdim=True) / away.square().sum(-1, keepdim=True)
    scales = torch.where(most > least, fit, 0.0).half()
    both = torch.cat([scales, (means - scales * around).half()], dim=-1)
    scale, added = both.float().split(1, dim=-1)
    numbers = ((groups - added) / scale.clamp_min(LEAST)).round().clamp(0, 15).byte()
    lower, upper = numbers.chunk(2, dim=-1)
    return torch.cat([both.view(torch.uint8), lower | upper << 4], dim=-1)


def as_q8_0(groups: torch.Tensor) -> torch.Tensor:
    """Blocks [..., 34] of Q8_0 of values [..., 32]."""
    scales = (groups.abs().amax(-1, keepdim=True) / LEVELS).half()
    numbers = (groups / scales.float().clamp_min(LEAST)).round().clamp(-LEVELS, LEVELS).char()
    return torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], dim=-1)


@dataclass(frozen=True)
class Blocks:
    """A matrix [N, K] in blocks of a kind of `KINDS`, whose bytes may be those of a mapped file."""

    kind: str
    raw: torch.Tensor  # [N, bytes of a row] uint8

    @classmethod
    def rounded(cls, weight: torch.Tensor, kind: str) -> "Blocks":
        """A matrix [N, K], K a multiple of 32, in blocks of Q4_1 or Q8_0."""
        make = {"Q4_1": as_q4_1, "Q8_0": as_q8_0}[kind]
        groups = weight.detach().unflatten(-1, (-1, GROUP)).split(ROWS)
        return cls(kind, torch.cat([make(some.float()) for some in groups]).flatten(1))

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        kind = KINDS[self.kind]
        return self.raw.shape[0], self.raw.shape[1] // kind.bytes * kind.values

    def parts(self, rows: torch.Tensor | slice = slice(None)) -> Parts:
        """The contents of some rows' blocks: numbers [..., K], and scales and minima of groups."""
        kind = KINDS[self.kind]
        found = kind.parts(self.raw[rows].unflatten(-1, (-1, kind.bytes)))
        return Parts._make(part if part is None else part.flatten(-2) for part in found)

    def rows(self, ids: torch.Tensor | slice) -> torch.Tensor:
        """Rows [..., K] in float32, as of embeddings: `ids` [...]."""
        numbers, scales, minima, _ = self.parts(ids)
        groups = numbers.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
        return (groups if minima is None else groups - minima[..., None]).flatten(-2)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """All weights [N, K]."""
        made = torch.empty(self.shape, dtype=dtype)
        for start in range(0, len(made), ROWS):
            made[start : start + ROWS] = self.rows(slice(start, start + ROWS))
        return made


def rounded(x: torch.Tensor, share: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers [..., K] of inputs [..., K], as float32, and scales [..., K / share]."""
    groups = x.float().unflatten(-1, (-1, share))
    largest = groups.abs().amax(-1).clamp_min(LEAST)
    levels = torch.full_like(largest, LEVELS)  # torch makes `127 / largest` of a reciprocal
    return (groups * (levels / largest)[..., None]).round().flatten(-2), largest / levels


def product(
    x: torch.Tensor,  # [..., K]
    blocks: Blocks,
    bias: torch.Tensor | None,  # [N]
) -> torch.Tensor:
    """x weight^T + bias [..., N], in the type of x: with the bits that kernels give."""
    inputs, their = rounded(x.flatten(0, -2), KINDS[blocks.kind].values)
    numbers, scales, minima, given = blocks.parts()
    factors = scales if given is None else given
    size, of_block = numbers.shape[1] // scales.shape[1], scales.shape[1] // factors.shape[1]
    multiples = (scales / factors.repeat_interleave(of_block, 1)).nan_to_num(0)  # of a factor 0
    groups = list(zip(inputs.split(size, dim=1), numbers.float().split(size, dim=1), strict=True))
    found = (x.new_zeros(len(numbers)) if bias is None else bias).float().expand(len(inputs), -1)
    for block, scale in enumerate(their.split(1, dim=1)):
        whole = taken = torch.zeros_like(found, dtype=torch.float64)
        for group in range(block * of_block, (block + 1) * of_block):  # these sums are exact
            some, columns = groups[group]
            whole = whole + (some @ columns.T).double() * multiples[:, group].double()
            if minima is not None:
                taken = taken + some.sum(-1, keepdim=True).double() * minima[:, group].double()
        total = (whole.float() * factors[:, block]).double() - taken
        found = multiply_add(total.float(), scale, found)
    return found.unflatten(0, x.shape[:-1]).to(x.dtype)


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c [...], rounded once to float32."""
    return (a.double() * b.double() + c.double()).float()
