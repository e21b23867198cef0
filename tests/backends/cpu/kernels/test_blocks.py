"""Weights in blocks, as GGUF files hold them: read as gguf reads them, and multiplied."""

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_writing import random_blocks
from torch.nn import functional

from drafthead.backends.cpu.kernels import library, packing
from drafthead.core.target.blocks import KINDS, Blocks, product

needs_kernels = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")
ROWS = 70


def blocks_of(kind: str, columns: int, inner: int) -> Blocks:
    """Random blocks of a matrix [columns, inner]."""
    return Blocks(kind, random_blocks(kind, columns, inner))


def inputs(inner: int, rows: int = ROWS) -> torch.Tensor:
    """Rows of bfloat16 numbers, one of them zeros."""
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(inner)).bfloat16()
    x[1 % rows] = 0
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_read_as_gguf_reads_them(kind) -> None:
    blocks = blocks_of(kind, 5, 512)
    expected = torch.from_numpy(quants.dequantize(blocks.raw.numpy(), GGMLQuantizationType[kind]))
    assert blocks.shape == expected.shape
    assert torch.equal(blocks.dequantised(torch.float32), expected)
    ids = torch.tensor([[4, 0], [1, 1]])
    assert torch.equal(blocks.rows(ids), expected[ids])


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_weights_are_rounded_to_blocks_at_least_as_well_as_gguf_does(kind) -> None:
    weight = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    weight[7], weight[8] = 0, 0.25
    theirs = quants.quantize(weight.numpy(), GGMLQuantizationType[kind])
    least = (Blocks(kind, torch.from_numpy(theirs)).rows(...) - weight).norm()
    found = Blocks.rounded(weight, kind).rows(...)
    assert (found - weight).norm() <= (0.97 if kind == "Q4_1" else 1) * least
    torch.testing.assert_close(found[7:9], weight[7:9], rtol=2**-11, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_near_that_of_the_weights_and_one_of_each_row_alone(kind) -> None:
    blocks, x, bias = blocks_of(kind, 40, 768), torch.randn(2, 3, 768), torch.randn(40)
    exact, found = functional.linear(x, blocks.dequantised(x.dtype), bias), product(x, blocks, bias)
    assert (found - exact).norm() / exact.norm() < 0.01
    assert torch.equal(product(x[1, 2][None], blocks, bias)[0], found[1, 2])


@needs_kernels
@pytest.mark.parametrize("columns", [33, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_give_the_bits_of_the_product_in_any_number_of_rows(kind, columns) -> None:
    """Of every set of kernels, so that all have the same."""
    inner = 768 if KINDS[kind].values == 256 else 96
    blocks, x = blocks_of(kind, columns, inner), inputs(inner)
    bias = torch.randn(columns).bfloat16() if columns == 33 else None
    packed, expected = packing.pack_blocks([blocks]), product(x, blocks, bias)
    for count in range(ROWS + 1):
        found = torch.ops.drafthead.linear(x[:count], packed, columns, bias)
        assert torch.equal(found, expected[:count]), count


@needs_kernels
@pytest.mark.parametrize("rows", [1, 17])  # many are multiplied by tiles, where there are any
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_sums_within_blocks_whose_groups_share_a_factor_are_exact(kind, rows) -> None:
    """Of so many products that sums in float32 would round some another way."""
    blocks, x = blocks_of(kind, 40_000 // rows, 1024), inputs(1024, rows + 2)[2:]
    found = torch.ops.drafthead.linear(x, packing.pack_blocks([blocks]), len(blocks.raw), None)
    assert torch.equal(found, product(x, blocks, None))


@needs_kernels
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_numbers_overflow_no_sum(kind, byte) -> None:
    """Of weights, of scales that have eight bits or fewer, and of inputs that become 127 and -127:
    at first sums have 16 bits, and tiles multiply numbers times scales as bytes.
    """
    blocks = blocks_of(kind, 32, 256)
    each = KINDS[kind].bytes
    halves = {"Q4_1": 4, "Q4_K": 4, "Q5_K": 4, "Q6_K": 0}.get(kind, 2)  # bytes before the others
    numbers = slice(halves, each - 2 if kind == "Q6_K" else each)
    blocks.raw.unflatten(1, (-1, each))[..., numbers] = byte
    x = torch.ones(3, 256).bfloat16()
    x[1], x[2, ::2] = -1, -1
    packed = packing.pack_blocks([blocks])
    for rows in (x, x.repeat(7, 1)):
        found = torch.ops.drafthead.linear(rows, packed, 32, None)
        assert torch.equal(found, product(rows, blocks, None))


@needs_kernels
def test_matrices_of_several_kinds_are_multiplied_as_one() -> None:
    parts = [blocks_of(kind, 64, 512) for kind in KINDS]
    x, packed = inputs(512, 3), packing.pack_blocks(parts)
    found = torch.ops.drafthead.linear(x[None], packed, 64 * len(parts), None)[0]
    assert torch.equal(found, torch.cat([product(x, part, None) for part in parts], dim=-1))
    assert packing.pack_blocks(parts).data_ptr() == packed.data_ptr(), "found again"


@needs_kernels
@pytest.mark.parametrize("kinds", [("Q4_1", "Q4_1"), ("Q4_K", "Q6_K")])
def test_gates_of_blocks_are_those_of_their_products(kinds) -> None:
    gate, up = (blocks_of(kind, 96, 256) for kind in kinds)
    x, packed = inputs(256), packing.pack_blocks([gate, up], paired=True)
    expected = functional.silu(product(x, gate, None)).double() * product(x, up, None).double()
    found = torch.ops.drafthead.gated(x, packed, 96)
    torch.testing.assert_close(found.double(), expected, rtol=2**-6, atol=4e-3)
    for count in (1, 9, 65):
        assert torch.equal(torch.ops.drafthead.gated(x[:count], packed, 96), found[:count])


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_packed_blocks_take_hardly_more_memory_than_the_file(kind) -> None:
    blocks = blocks_of(kind, 64, 1536)
    assert packing.pack_blocks([blocks]).nbytes <= 1.04 * blocks.raw.nbytes


@needs_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_number_that_is_none_or_infinite_reaches_its_own_row_alone(kind, value) -> None:
    blocks, x = blocks_of(kind, 40, 64), inputs(64, 3)
    x[1, 5] = value
    found = torch.ops.drafthead.linear(x, packing.pack_blocks([blocks]), 40, None)
    assert not found[1].isfinite().any() and found[::2].isfinite().all()
