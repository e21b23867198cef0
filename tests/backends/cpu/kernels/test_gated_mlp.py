"""The first half of a gated MLP as one function: right, alike for any rows, and really used."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from drafthead.backends.compiled import Compiled, has_kernels
from drafthead.backends.cpu.kernels import packing

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no kernels for this processor")
INNER = 96


class GatedMLP(nn.Module):
    """Llama's, with gate and up apart or, as in Phi-3, as one product."""

    def __init__(self, size: int, together: bool, bias: bool = False):
        super().__init__()
        outputs = [2 * size] if together else [size, size]
        self.products = nn.ModuleList(nn.Linear(INNER, n, bias=bias) for n in outputs)
        self.down = nn.Linear(size, INNER, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., INNER] to the same."""
        results = [product(x) for product in self.products]
        gate, up = results if len(results) == 2 else results[0].chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


def made(size: int, together: bool, bias: bool = False) -> GatedMLP:
    torch.manual_seed(size)
    return GatedMLP(size, together, bias).bfloat16().requires_grad_(False)


def compiled(mlp: GatedMLP, in_bytes: bool = False) -> Compiled:
    made_for = torch.device("cpu"), torch.bfloat16
    return Compiled(lambda x: mlp(x), *made_for, {"x": "B ."}, in_bytes=in_bytes)


@pytest.mark.parametrize(
    ("size", "together", "bias", "used"),
    [
        (64, False, False, True),
        (64, True, False, True),
        (48, False, False, False),  # no whole blocks
        (64, False, True, False),
    ],
)
def test_gated_mlps_are_one_function_where_their_blocks_can_be_paired(
    size, together, bias, used, sizes_rendered
) -> None:
    rendered = sizes_rendered("gated_mlp")
    mlp = made(size, together, bias)
    x = torch.randn(3, INNER).bfloat16()
    with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):
        found = compiled(mlp)(x)
    assert set(rendered) == ({size} if used else set())
    torch.testing.assert_close(found, mlp(x), rtol=2**-7, atol=2e-3)


@pytest.fixture(scope="module")
def mlp() -> GatedMLP:
    return made(160, together=False)


@pytest.fixture(scope="module")
def pass_of_mlp(mlp) -> Compiled:
    return compiled(mlp)


@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 30])
def test_the_function_equals_float64_up_to_its_roundings(mlp, pass_of_mlp, rows) -> None:
    torch.manual_seed(rows)
    x = 3 * torch.randn(rows, INNER).bfloat16()
    weights = [product.weight.double() for product in (*mlp.products, mlp.down)]
    with torch.inference_mode():
        gate, up = (functional.linear(x.double(), w).bfloat16().double() for w in weights[:2])
        gated = (functional.silu(gate).bfloat16().double() * up).bfloat16().double()
        expected = functional.linear(gated, weights[2])
        torch.testing.assert_close(pass_of_mlp(x).double(), expected, rtol=2**-7, atol=2e-3)


def test_a_row_has_the_same_bits_among_any_number_of_rows(pass_of_mlp) -> None:
    x = torch.randn(30, INNER).bfloat16()
    with torch.inference_mode():
        everything = pass_of_mlp(x)
        for count in (1, 2, 5, 8, 12, 13):
            assert torch.equal(everything[:count], pass_of_mlp(x[:count]))


def test_paired_blocks_lie_next_to_each_other() -> None:
    gate, up = torch.randn(2, 64, 8).bfloat16()
    apart, paired = packing.pack([gate, up]), packing.pack([gate, up], paired=True)
    assert torch.equal(paired, apart[[0, 2, 1, 3]])
    x = torch.randn(2, 8).bfloat16()
    torch.testing.assert_close(
        torch.ops.drafthead.gated(x, paired, 64),
        functional.silu(functional.linear(x, gate)) * functional.linear(x, up),
    )


@pytest.mark.parametrize("rows", [1, 5, 13, 40])
def test_weights_in_bytes_are_multiplied_in_the_same_way(rows, sizes_rendered) -> None:
    """The function for bytes equals the separate operations on the rounded weights."""
    rendered, mlp = sizes_rendered("gated_mlp"), made(64, together=False)
    rounded = made(64, together=False)
    for product in (*rounded.products, rounded.down):
        weight = product.weight
        packed = packing.pack([weight], False, True)
        product.weight.data = packing.unpacked(packed, weight.shape[1]).flatten(0, 1)
    x = torch.randn(rows, INNER).bfloat16()
    with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):
        found = compiled(mlp, in_bytes=True)(x)
    assert set(rendered) == {64}
    torch.testing.assert_close(found, rounded(x), rtol=2**-6, atol=4e-3)


def test_paired_bytes_are_read_as_they_are_packed() -> None:
    gate, up = torch.randn(2, 64, 8).bfloat16()
    apart, paired = (packing.pack([gate, up], kind, True) for kind in (False, True))
    assert torch.equal(paired.view(torch.int16), apart[[0, 2, 1, 3]].view(torch.int16))
    x = torch.randn(2, 8).bfloat16()
    whole = torch.ops.drafthead.linear(x, apart, 128, None)
    first, second = whole.chunk(2, dim=-1)
    torch.testing.assert_close(
        torch.ops.drafthead.gated(x, paired, 64), functional.silu(first) * second
    )
