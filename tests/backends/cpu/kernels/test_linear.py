"""The matrix kernel for few bfloat16 rows: right, and alike for a row alone and among others."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from drafthead.backends.compiled import Compiled, has_kernels
from drafthead.backends.cpu.kernels import packing

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no kernels for this processor")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def layers() -> nn.ModuleList:
    """Outputs that fill blocks of 32 columns and ones that do not; with a bias and without."""
    torch.manual_seed(0)
    sizes = [(96, 128, False), (96, 40, True), (70, 33, False)]
    made = [nn.Linear(k, n, bias=bias) for k, n, bias in sizes]
    return nn.ModuleList(made).to(torch.bfloat16).requires_grad_(False)


def compiled(layers: nn.ModuleList, in_bytes: bool = False) -> Compiled:
    def multiply(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer, x in zip(layers, rows, strict=True))

    return Compiled(multiply, CPU, torch.bfloat16, {"rows": "B ."}, in_bytes=in_bytes)


@pytest.fixture(scope="module")
def products(layers) -> Compiled:
    return compiled(layers)


def inputs(layers: nn.ModuleList, rows: int) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    return [torch.randn(rows, layer.in_features).bfloat16() for layer in layers]


def compiled_again(call) -> None:
    """Call what compiles, without the code that torch has stored of earlier times."""
    with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):
        call()


def test_generated_code_uses_the_kernel(layers, sizes_rendered) -> None:
    made = sizes_rendered("linear")
    compiled_again(lambda: compiled(layers)(inputs(layers, 1)))
    assert set(made) == {128, 40, 33}


def test_products_of_one_input_are_one_product(layers, sizes_rendered) -> None:
    """Such as queries, keys and values; a product with a bias is not joined to one without."""
    torch.manual_seed(0)
    others = [nn.Linear(96, n, bias=bias).bfloat16() for n, bias in ((40, False), (8, True))]
    alike = nn.ModuleList([*layers[:2], *others]).requires_grad_(False)
    x = torch.randn(3, 96).bfloat16()
    found: list[torch.Tensor] = []
    made = sizes_rendered("linear")
    compiled_again(lambda: found.extend(compiled(alike)([x] * 4)))
    assert set(made) == {128 + 40, 40 + 8}
    for layer, result in zip(alike, found, strict=True):
        torch.testing.assert_close(result, layer(x), rtol=2**-7, atol=1e-3)


@pytest.fixture
def packed(monkeypatch) -> list[torch.Tensor]:
    """The weights that are packed in a test."""
    found: list[torch.Tensor] = []
    in_blocks = packing.in_blocks
    monkeypatch.setattr(packing, "in_blocks", lambda w: found.append(w) or in_blocks(w))
    return found


def test_weights_of_one_product_are_not_packed_apart_as_well(packed) -> None:
    torch.manual_seed(0)
    alike = nn.ModuleList([nn.Linear(64, n, bias=False) for n in (32, 64)]).bfloat16()
    other = nn.Linear(64, 64, bias=False).bfloat16()
    layers = nn.ModuleList([*alike, alike[0], other]).requires_grad_(False)
    x, y = torch.randn(2, 3, 64).bfloat16()
    with torch.inference_mode():
        results = compiled(layers)([x, x, y, y])  # the first weight is in both products
    assert [len(weight) for weight in packed] == [32 + 64, 32 + 64]
    for layer, argument, result in zip(layers, (x, x, y, y), results, strict=True):
        torch.testing.assert_close(result, layer(argument), rtol=2**-7, atol=1e-3)


def test_graphs_share_one_packed_copy_of_a_weight(packed) -> None:
    layer = nn.Linear(64, 32, bias=False).bfloat16().requires_grad_(False)
    layers = nn.ModuleList([layer])
    product = compiled(layers)
    with torch.inference_mode():
        for rows in (1, 5):  # a graph each
            product(inputs(layers, rows))
    assert len(product.graphs) == 2 and len(packed) == 1


def test_weights_that_were_changed_in_place_are_packed_again() -> None:
    layers = nn.ModuleList([nn.Linear(64, 32, bias=False)]).bfloat16().requires_grad_(False)
    x = inputs(layers, 1)
    with torch.inference_mode():
        (before,) = compiled(layers)(x)
        layers[0].weight.data *= 2
        (after,) = compiled(layers)(x)
    assert torch.equal(after, 2 * before) and before.any()


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16, 21])
def test_products_equal_float64_up_to_the_rounding_of_the_result(layers, products, rows) -> None:
    x = inputs(layers, rows)
    with torch.inference_mode():
        found = products(x)
    for layer, row, result in zip(layers, x, found, strict=True):
        bias = None if layer.bias is None else layer.bias.double()
        expected = nn.functional.linear(row.double(), layer.weight.double(), bias)
        torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_none_or_infinite_reaches_its_own_row_alone(
    layers, products, value
) -> None:
    x = inputs(layers, 3)
    for rows in x:
        rows[1, 5] = value
    with torch.inference_mode():
        found = products(x)
    for layer, rows, result in zip(layers, x, found, strict=True):
        assert not result[1].isfinite().any()
        assert torch.equal(result[1].isnan(), layer(rows)[1].isnan())
        assert result[::2].isfinite().all()


def test_a_row_has_the_same_bits_in_a_product_of_any_number_of_rows(layers, products) -> None:
    x = inputs(layers, 21)
    with torch.inference_mode():
        everything = products(x)
        for count in (1, 2, 5, 8, 12):
            part = products([rows[:count] for rows in x])
            for whole, some in zip(everything, part, strict=True):
                assert torch.equal(whole[:count], some)


# Weights in bytes


def in_bytes(layer: nn.Linear) -> torch.Tensor:
    """The layer's weights [N, K] as its bytes have them."""
    scales = layer.weight.float().abs().amax(1, keepdim=True) / 63
    return (layer.weight.float() / scales).round() * scales


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 40])
def test_products_of_bytes_are_those_of_rounded_weights(layers, rows) -> None:
    """The last layer's rows have 70 values, which fill no blocks of bytes: it stays as it is."""
    arguments = inputs(layers, rows)
    with torch.inference_mode():
        results = compiled(layers, in_bytes=True)(arguments)
    for layer, x, result in zip(layers, arguments, results, strict=True):
        weight = in_bytes(layer) if layer.in_features % 8 == 0 else layer.weight.float()
        bias = None if layer.bias is None else layer.bias.float()
        expected = nn.functional.linear(x.float(), weight, bias)
        torch.testing.assert_close(result.float(), expected, rtol=2**-8, atol=2e-3)


def test_a_row_in_bytes_has_the_same_product_alone_and_among_others(layers) -> None:
    product, arguments = compiled(layers, in_bytes=True), inputs(layers, 13)
    with torch.inference_mode():
        together = product(arguments)
        for row in (0, 7, 12):
            alone = product([x[[row]] for x in arguments])
            for part, whole in zip(alone, together, strict=True):
                assert torch.equal(part[0], whole[row])


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
