"""Code that torch generates for a pass calls the functions that the operations call.

What they compute is tested of the operations, beside this file.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from drafthead.backends.compiled import Compiled, has_kernels
from drafthead.backends.cpu.kernels import library, packing
from drafthead.backends.cpu.substitutions import replacement_of
from drafthead.core import sampling
from drafthead.core.kv_cache.column_cache import move_columns
from drafthead.core.sampling import RowSampling, SamplingConfig

pytestmark = pytest.mark.skipif(
    not (has_kernels() and library.loaded()), reason="there are no kernels for this processor"
)
CPU = torch.device("cpu")
INNER, WIDTH, VOCAB, HEADS, CAPACITY = 96, 64, 101, 4, 24
COUNTS = 1, 8, 64, 65  # of the largest; for 65 there is no kernel
ours = torch.ops.drafthead


class GatedMLP(nn.Module):
    """Llama's, with gate and up apart or, as in Phi-3, as one product."""

    def __init__(self, size: int, together: bool = False, bias: bool = False):
        super().__init__()
        outputs = [2 * size] if together else [size, size]
        self.products = nn.ModuleList(nn.Linear(INNER, n, bias=bias) for n in outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, INNER] to [B, size]."""
        results = [product(x) for product in self.products]
        gate, up = results if len(results) == 2 else results[0].chunk(2, dim=-1)
        return functional.silu(gate) * up


class Step(nn.Module):
    """All that kernels are for: products of two inputs, gated MLPs, and the end of a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(128, False), (40, True), (40, False), (8, True)]
        self.of_x = nn.ModuleList(nn.Linear(INNER, n, bias=bias) for n, bias in sizes)
        self.of_y = nn.ModuleList([nn.Linear(70, 33), nn.Linear(70, 64)])
        self.mlps = nn.ModuleList([
            GatedMLP(64), GatedMLP(64, together=True), GatedMLP(48), GatedMLP(64, bias=True),
        ])  # fmt: skip
        self.to(torch.bfloat16).requires_grad_(False)

    def products(self, x: torch.Tensor, y: torch.Tensor, each: torch.Tensor) -> list[torch.Tensor]:
        """[B, INNER], [B, 70] and, for each MLP, [B, INNER], to [B, ..]."""
        gated = [mlp(each[number]) for number, mlp in enumerate(self.mlps)]
        return [*(product(x) for product in self.of_x), *(of(y) for of in self.of_y), *gated]

    def after_pass(
        self, query, keys, values, mask, logits, tokens, parents, draws, settings, source, place
    ) -> list[torch.Tensor]:
        """Attention over a part of the cache, draws, the largest of many, and moves."""
        end = mask.shape[-1]
        mixed = ours.attend(query, keys[:, :, :end], values[:, :, :end], mask, 0.1)
        draw = replacement_of(sampling.draw, has_kernels=True)
        drawn = draw(logits + 0, tokens, parents, draws, settings, False)
        best = [logits.float().topk(count, dim=-1)[1] for count in COUNTS]
        replacement_of(move_columns, has_kernels=True)([keys], [values], source, place)
        return [mixed.transpose(1, 2).flatten(2), drawn, *best]

    def forward(
        self, x, y, each, query, keys, values, mask, logits, tokens, parents, draws, settings,
        source, place,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """All of it; a graph's inputs have names."""
        after = self.after_pass(
            query, keys, values, mask, logits, tokens, parents, draws, settings, source, place
        )
        return (*self.products(x, y, each), *after)


DIMS = {
    "x": "B .", "y": "B .", "each": ". B .", "query": "B . N .", "keys": "B . . .",
    "values": "B . . .",
    "mask": "B . N S", "logits": "B N .", "tokens": "B N", "parents": "B N", "draws": "B N",
    "settings": "B .", "source": "B P", "place": "B P",
}  # fmt: skip


def arguments(rows: int) -> list[torch.Tensor]:
    """The arguments of a step, alike at each call."""
    torch.manual_seed(rows)
    nodes, seen = 4, 12 + rows
    shapes = [(rows, INNER), (rows, 70), (4, rows, INNER), (rows, nodes, HEADS, WIDTH)]
    x, y, each, query = (torch.randn(*shape).bfloat16() for shape in shapes)
    keys, values = (torch.randn(rows, 2, CAPACITY, WIDTH).bfloat16() for _ in range(2))
    hidden = torch.rand(rows, 1, nodes, seen) < 0.3
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.bfloat16).min)
    logits = torch.randn(rows, nodes, VOCAB).bfloat16()  # of which many are equal
    parents = torch.tensor([-1, 0, 0, 2]).repeat(rows, 1)
    draws = torch.randint(-(2**63), 2**63 - 1, (rows, nodes))
    source, place = torch.tensor([[9, 12, 14], [8, 11, 9]]), torch.tensor([[8, 9, 10], [7, 8, 9]])
    settings = RowSampling((SamplingConfig(0.7),) * rows).settings(CPU)
    return [
        x, y, each, query.transpose(1, 2), keys, values, mask.bfloat16(), logits,
        torch.randint(VOCAB, (rows, nodes)), parents, draws, settings,
        source[:rows], place[:rows],
    ]  # fmt: skip


@pytest.fixture
def packed(monkeypatch) -> list[int]:
    """The rows of the weights that are packed from now on."""
    found: list[int] = []
    in_blocks = packing.in_blocks
    monkeypatch.setattr(packing, "in_blocks", lambda w: found.append(len(w)) or in_blocks(w))
    return found


def test_generated_code_calls_the_kernels(sizes_rendered, packed) -> None:
    """Products of one input are one product, but for those with a bias; gated MLPs are one function
    where their blocks can be paired.
    """
    names = ("linear", "gated_mlp", "attention", "draw", "top_k", "move_columns")
    rendered = {name: sizes_rendered(name) for name in names}
    step, given, same = Step(), arguments(2), arguments(2)
    compiled = Compiled(step.forward, CPU, torch.bfloat16, DIMS)
    with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):
        found, expected = compiled(*given), step(*same)
    assert {*rendered["linear"]} == {40 + 8, 2 * 48, 33 + 64, 128, 128 + 40}
    assert {*rendered["gated_mlp"]} == {64} and {*rendered["top_k"]} == {1, 8, 64}
    assert all(rendered.values())
    assert sorted(packed) == [40 + 8, 2 * 48, 33 + 64, 128, 128, 128, 128 + 40]
    products, after = found[: -len(COUNTS) - 2], found[-len(COUNTS) - 2 :]
    torch.testing.assert_close(products, expected[: len(products)], rtol=2**-7, atol=1e-2)
    for layer, product in zip(step.of_x, products, strict=False):
        weights, size = packing.pack([layer.weight]), layer.out_features
        assert torch.equal(product, ours.linear(given[0], weights, size, layer.bias))
    assert torch.equal(after[0], expected[len(products)])  # attention, by the same function
    assert torch.equal(after[1], expected[len(products) + 1])  # draws
    for moved, wanted in zip(given[4:6], same[4:6], strict=True):
        assert torch.equal(moved, wanted)
    in_order = given[7].float().sort(dim=-1, descending=True, stable=True).indices
    for count, places in zip(COUNTS[:-1], after[2:], strict=False):
        assert torch.equal(places, in_order[..., :count])


def test_weights_in_bytes_are_read_by_the_same_functions(sizes_rendered) -> None:
    """A layer whose rows have 70 values stays as it is: they fill no blocks of bytes."""
    rendered, step = sizes_rendered("gated_mlp"), Step()
    dims = {name: DIMS[name] for name in ("x", "y", "each")}

    def products(x, y, each) -> tuple[torch.Tensor, ...]:
        return tuple(step.products(x, y, each))

    compiled = Compiled(products, CPU, torch.bfloat16, dims, in_bytes=True)
    x, y, each = arguments(2)[:3]
    with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):
        found = compiled(x, y, each)
    assert set(rendered) == {64}
    for layer, product in zip([*step.of_x, *step.of_y], found, strict=False):
        in_bytes = layer.in_features == INNER
        weights, given = packing.pack([layer.weight], False, in_bytes), x if in_bytes else y
        assert torch.equal(product, ours.linear(given, weights, layer.out_features, layer.bias))
    gate, up = (product.weight for product in step.mlps[0].products)
    paired = packing.pack([gate, up], True, True)
    assert torch.equal(found[6], ours.gated(each[0], paired, 64))


def test_graphs_share_a_packed_weight_until_it_changes(packed) -> None:
    layer = nn.Linear(64, 32, bias=False).bfloat16().requires_grad_(False)
    x, results = torch.randn(5, 64).bfloat16(), []
    with torch.inference_mode():
        for factor in (1, 2):
            layer.weight.data *= factor
            product = Compiled(lambda x: layer(x), CPU, torch.bfloat16, {"x": "B ."})
            results.append(product(x))
            assert torch.equal(product(x[:1]), results[-1][:1])  # a graph of its own
            assert packed == [32] * factor
    assert torch.equal(results[1], 2 * results[0]) and results[0].any()
