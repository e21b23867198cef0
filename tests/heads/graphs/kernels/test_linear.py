"""The matrix kernel for few bfloat16 rows: right, and alike for a row alone and among others."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from drafthead.heads.graphs.compiled import Compiled
from drafthead.heads.graphs.kernels import linear

pytestmark = pytest.mark.skipif(
    not linear.has_kernel(), reason="this processor does not compute in bfloat16 by AVX512"
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def layers() -> nn.ModuleList:
    """Outputs that fill blocks of 32 columns and ones that do not; with a bias and without."""
    torch.manual_seed(0)
    sizes = [(96, 128, False), (96, 40, True), (70, 33, False)]
    made = [nn.Linear(k, n, bias=bias) for k, n, bias in sizes]
    return nn.ModuleList(made).to(torch.bfloat16).requires_grad_(False)


def compiled(layers: nn.ModuleList) -> Compiled:
    def multiply(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer, x in zip(layers, rows, strict=True))

    return Compiled(multiply, CPU, torch.bfloat16, {"rows": "B ."})


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
    in_blocks = linear.in_blocks
    monkeypatch.setattr(linear, "in_blocks", lambda w: found.append(w) or in_blocks(w))
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


def test_a_row_has_the_same_bits_in_a_product_of_any_number_of_rows(layers, products) -> None:
    x = inputs(layers, 21)
    with torch.inference_mode():
        everything = products(x)
        for count in (1, 2, 5, 8, 12):
            part = products([rows[:count] for rows in x])
            for whole, some in zip(everything, part, strict=True):
                assert torch.equal(whole[:count], some)
