"""The matrix kernel for few bfloat16 rows: right, and alike for a row alone and among others."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from drafthead.backends.cpu.kernels import library, packing
from drafthead.core.target import int8

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")


@pytest.fixture(scope="module")
def layers() -> nn.ModuleList:
    """Rows and columns that fill blocks of 32 and ones that do not; with a bias and without."""
    torch.manual_seed(0)
    sizes = [(96, 128, False), (96, 40, True), (104, 33, True), (70, 33, False)]
    made = [nn.Linear(k, n, bias=bias) for k, n, bias in sizes]
    return nn.ModuleList(made).to(torch.bfloat16).requires_grad_(False)


def products(
    layers: nn.ModuleList, rows: Sequence[torch.Tensor], in_int8: bool = False
) -> list[torch.Tensor]:
    """Of each layer with its rows."""
    found = []
    for layer, x in zip(layers, rows, strict=True):
        packed = packing.pack([layer.weight], False, in_int8)
        found.append(torch.ops.drafthead.linear(x, packed, layer.out_features, layer.bias))
    return found


def inputs(layers: nn.ModuleList, rows: int) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    return [torch.randn(rows, layer.in_features).bfloat16() for layer in layers]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16, 21])
def test_products_equal_float64_up_to_the_rounding_of_the_result(layers, rows) -> None:
    x = inputs(layers, rows)
    found = products(layers, x)
    for layer, row, result in zip(layers, x, found, strict=True):
        bias = None if layer.bias is None else layer.bias.double()
        expected = nn.functional.linear(row.double(), layer.weight.double(), bias)
        torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_none_or_infinite_reaches_its_own_row_alone(layers, value) -> None:
    x = inputs(layers, 3)
    for rows in x:
        rows[1, 5] = value
    found = products(layers, x)
    for layer, rows, result in zip(layers, x, found, strict=True):
        assert not result[1].isfinite().any()
        assert torch.equal(result[1].isnan(), layer(rows)[1].isnan())
        assert result[::2].isfinite().all()


def test_a_row_has_the_same_bits_in_a_product_of_any_number_of_rows(layers) -> None:
    check_alike(layers, in_int8=False)


def check_alike(layers: nn.ModuleList, in_int8: bool) -> None:
    """Products of 0 to 70 rows with the layers have the bits of each row's own.

    A large product of torch between them uses the processor's tiles, too, if there are any.
    """
    x, other = inputs(layers, 70), torch.randn(256, 256).bfloat16()
    alone = [products(layers, [rows[[r]] for rows in x], in_int8) for r in range(70)]
    for count in range(71):
        torch.mm(other, other)
        together = products(layers, [rows[:count] for rows in x], in_int8)
        for layer, found in enumerate(together):
            for r, own in enumerate(alone[:count]):
                assert torch.equal(found[r], own[layer][0]), (count, layer, r)


# Whole numbers


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 40])
def test_products_of_whole_numbers_have_the_bits_of_torchs(layers, rows) -> None:
    """Of every set of kernels, so that all have the same; a row of zeros among the others."""
    arguments = inputs(layers, rows)
    arguments[0][0] = 0
    results = products(layers, arguments, in_int8=True)
    for layer, x, result in zip(layers, arguments, results, strict=True):
        expected = int8.product(x, *int8.rounded(layer.weight), layer.bias)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("inner", [1, 63, 64, 576])
def test_rows_are_rounded_as_torch_rounds_them(inner) -> None:
    """Of very different sizes, zeros, infinite numbers and what is none among them."""
    torch.manual_seed(inner)
    x = (torch.randn(40, inner) * 10.0 ** torch.arange(-20, 20)[:, None]).bfloat16()
    x[3], x[4, 0], x[5, 0] = 0, torch.inf, torch.nan
    numbers, scales = torch.ops.drafthead.int8_rows(x)
    expected, their = int8.rounded(x)
    torch.testing.assert_close(scales, their, rtol=0, atol=0, equal_nan=True)
    finite = scales.isfinite()
    assert finite.sum() == 38 and torch.equal(numbers[finite], expected[finite])


def test_a_row_of_whole_numbers_has_the_same_product_alone_and_among_others(layers) -> None:
    check_alike(layers, in_int8=True)


def test_whole_numbers_and_bfloat16_are_packed_apart() -> None:
    weight = torch.randn(40, 64).bfloat16()
    first, second = packing.pack([weight]), packing.pack([weight], False, True)
    assert first.shape == (2, 32, 32, 2) and second.shape == (2, 64 // 4 + 2, 32)
    assert torch.equal(packing.unpacked(first).flatten(0, 1)[:40], weight)
    numbers, scales = packing.unpacked_int8(second)
    expected, their = int8.rounded(weight)
    assert torch.equal(numbers.flatten(0, 1)[:40], expected)
    assert torch.equal(scales.flatten()[:40], their)
