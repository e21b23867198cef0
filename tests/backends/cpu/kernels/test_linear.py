"""The matrix kernel for few bfloat16 rows: right, and alike for a row alone and among others."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from drafthead.backends.cpu.kernels import library, packing

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")


@pytest.fixture(scope="module")
def layers() -> nn.ModuleList:
    """Rows and columns that fill blocks of 32 and ones that do not; with a bias and without."""
    torch.manual_seed(0)
    sizes = [(96, 128, False), (96, 40, True), (104, 33, True), (70, 33, False)]
    made = [nn.Linear(k, n, bias=bias) for k, n, bias in sizes]
    return nn.ModuleList(made).to(torch.bfloat16).requires_grad_(False)


def products(
    layers: nn.ModuleList, rows: Sequence[torch.Tensor], in_bytes: bool = False
) -> list[torch.Tensor]:
    """Of each layer with its rows; those whose rows fill no blocks of bytes stay as they are."""
    found = []
    for layer, x in zip(layers, rows, strict=True):
        packed = packing.pack([layer.weight], False, in_bytes and layer.in_features % 8 == 0)
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
    check_alike(layers, in_bytes=False)


def check_alike(layers: nn.ModuleList, in_bytes: bool) -> None:
    """Products of 0 to 70 rows with the layers have the bits of each row's own.

    A large product of torch between them uses the processor's tiles, too, if there are any.
    """
    x, other = inputs(layers, 70), torch.randn(256, 256).bfloat16()
    alone = [products(layers, [rows[[r]] for rows in x], in_bytes) for r in range(70)]
    for count in range(71):
        torch.mm(other, other)
        together = products(layers, [rows[:count] for rows in x], in_bytes)
        for layer, found in enumerate(together):
            for r, own in enumerate(alone[:count]):
                assert torch.equal(found[r], own[layer][0]), (count, layer, r)


# Weights in bytes


def in_bytes(layer: nn.Linear) -> torch.Tensor:
    """The layer's weights [N, K] as its bytes have them."""
    scales = layer.weight.float().abs().amax(1, keepdim=True) / 63
    return (layer.weight.float() / scales).round() * scales


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 40])
def test_products_of_bytes_are_those_of_rounded_weights(layers, rows) -> None:
    """The last layer's rows have 70 values, which fill no blocks of bytes: it stays as it is."""
    arguments = inputs(layers, rows)
    results = products(layers, arguments, in_bytes=True)
    for layer, x, result in zip(layers, arguments, results, strict=True):
        weight = in_bytes(layer) if layer.in_features % 8 == 0 else layer.weight.float()
        bias = None if layer.bias is None else layer.bias.float()
        expected = nn.functional.linear(x.float(), weight, bias)
        torch.testing.assert_close(result.float(), expected, rtol=2**-8, atol=2e-3)


def test_a_row_in_bytes_has_the_same_product_alone_and_among_others(layers) -> None:
    check_alike(layers, in_bytes=True)


def test_bytes_hold_every_column_to_seven_bits() -> None:
    """Of very different sizes, zeros among them."""
    torch.manual_seed(0)
    weight = (torch.randn(40, 64) * 10.0 ** torch.arange(-20, 20)[:, None]).bfloat16()
    weight[3] = 0
    packed = packing.pack([weight], False, True)
    assert packed.shape == (2, 64 // 4 + 1, 32, 2)
    found = packing.unpacked(packed, 64).flatten(0, 1)[:40].float()
    step = weight.float().abs().amax(1, keepdim=True) / 63
    error = (found - weight.float()).abs()
    assert error.le(0.501 * step + 2**-8 * found.abs()).all(), "half a step, in bfloat16"
    assert not found[3].any()


def test_bytes_and_bfloat16_are_packed_apart() -> None:
    weight = torch.randn(32, 64).bfloat16()
    first, second = packing.pack([weight]), packing.pack([weight], False, True)
    assert first.shape[1] == 32 and second.shape[1] == 17
    assert torch.equal(packing.unpacked(first, 64)[0], weight)
