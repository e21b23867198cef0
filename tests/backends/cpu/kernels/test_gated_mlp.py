"""The first half of a gated MLP as one function: right, and alike for any rows."""

import pytest
import torch
from torch.nn import functional

from drafthead.backends.cpu.kernels import library, packing
from drafthead.core.target import int8

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")
INNER, SIZE = 96, 160


@pytest.fixture(scope="module")
def weights() -> torch.Tensor:
    """Weights of gate and up [2, SIZE, INNER]."""
    torch.manual_seed(0)
    return (torch.randn(2, SIZE, INNER) / INNER**0.5).bfloat16()


def gated(x: torch.Tensor, weights: torch.Tensor, in_int8: bool = False) -> torch.Tensor:
    """silu(x gate^T) * (x up^T) by the kernel."""
    return torch.ops.drafthead.gated(x, packing.pack([*weights], True, in_int8), SIZE)


@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 30, 40])
def test_the_function_equals_float64_up_to_its_roundings(weights, rows, in_int8) -> None:
    """With whole numbers it is that of the products."""
    torch.manual_seed(rows)
    x, exact = 3 * torch.randn(rows, INNER).bfloat16(), weights.double()
    if in_int8:
        gate, up = (int8.product(x, *int8.rounded(w), None).double() for w in weights)
    else:
        gate, up = (functional.linear(x.double(), w).bfloat16().double() for w in exact)
    expected = functional.silu(gate).bfloat16().double() * up
    found = gated(x, weights, in_int8).double()
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=4e-3)


@pytest.mark.parametrize("in_int8", [False, True])
def test_a_row_has_the_same_bits_among_any_number_of_rows(weights, in_int8) -> None:
    x = torch.randn(70, INNER).bfloat16()
    alone = torch.cat([gated(row[None], weights, in_int8) for row in x])
    for count in range(71):
        assert torch.equal(alone[:count], gated(x[:count], weights, in_int8)), count


def test_paired_blocks_lie_next_to_each_other() -> None:
    gate, up = torch.randn(2, 64, 8).bfloat16()
    apart, paired = packing.pack([gate, up]), packing.pack([gate, up], paired=True)
    assert torch.equal(paired, apart[[0, 2, 1, 3]])
    x = torch.randn(2, 8).bfloat16()
    torch.testing.assert_close(
        torch.ops.drafthead.gated(x, paired, 64),
        functional.silu(functional.linear(x, gate)) * functional.linear(x, up),
    )


def test_paired_whole_numbers_are_read_as_they_are_packed() -> None:
    gate, up = torch.randn(2, 64, 8).bfloat16()
    apart, paired = (packing.pack([gate, up], kind, True) for kind in (False, True))
    assert torch.equal(paired.view(torch.int16), apart[[0, 2, 1, 3]].view(torch.int16))
    x = torch.randn(2, 8).bfloat16()
    whole = torch.ops.drafthead.linear(x, apart, 128, None)
    first, second = whole.chunk(2, dim=-1)
    torch.testing.assert_close(
        torch.ops.drafthead.gated(x, paired, 64), functional.silu(first) * second
    )
