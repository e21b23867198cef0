"""Decoder layers compiled one by one, as recorded passes on a GPU run them; here for a CPU."""

import logging
import os
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from stages import more
from tiny import random_prompts, tiny_llama
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.func import functional_call

from drafthead.backends.cuda import compiled, merged_products
from drafthead.backends.cuda.compiled import LONG, Compiled, keep_compiled_code
from drafthead.backends.cuda.compiled_layers import CompiledLayers, Together, without_weights
from drafthead.backends.cuda.merged_products import MergedProducts, side_by_side
from drafthead.core.errors import UserError
from drafthead.core.substitution import Substituting, Substitution
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.hooks import Taps
from drafthead.core.target.target import Target
from drafthead.core.target.tree_cache import StepCache
from drafthead.core.trees.tree import Budget
from drafthead.infer.decoder import Decoder

LAYERS = 4
GROWTH, DRAWN = ("start_growth", "grow", "finish"), {"temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_llama(0, num_hidden_layers=LAYERS))


def cache_of(target: Target, rows: int, columns: int, nodes: int) -> StepCache:
    """A cache of random numbers whose last columns a pass writes."""
    torch.manual_seed(1)
    heads = target.config.num_key_value_heads
    size = target.config.hidden_size // target.config.num_attention_heads
    keys, values = (
        [torch.randn(rows, heads, 64, size) for _ in range(LAYERS)] for _ in ("keys", "values")
    )
    return StepCache(keys, values, torch.arange(columns - nodes, columns), columns)


@pytest.mark.thorough
def test_one_code_serves_all_layers_and_lengths(target: Target) -> None:
    codes, taps = CompiledLayers([*target.layers.children()], {}), Taps(target, FeatureSpec((1,)))
    around = Together(lambda: taps, codes.used)
    torch._dynamo.utils.counters.clear()
    for rows, nodes, columns in ((2, 4, 24), (2, 5, 40), (3, 4, 24)):
        ids = torch.randint(5, 50, (rows, nodes))
        positions = torch.arange(nodes).expand(rows, -1) + columns - nodes
        mask = torch.zeros(rows, 1, nodes, columns)
        plain, ours = (cache_of(target, rows, columns, nodes) for _ in range(2))
        with torch.no_grad():
            expected = target.forward(ids, positions, mask, plain)
            with around:
                found = target.forward(ids, positions, mask, ours)
                features = taps.features()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close([*ours.keys, *ours.values], [*plain.keys, *plain.values])
        assert features.taps[0].shape[:2] == (rows, nodes)
    assert codes.reason_against is None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_layers_that_cannot_be_compiled_run_as_they_are(target: Target, caplog) -> None:
    codes = CompiledLayers([*target.layers.children()], {})

    def refuse(*_: object) -> None:
        raise AttributeError("no such thing")

    codes.codes = [refuse] * LAYERS  # type: ignore[list-item]
    ids, positions = torch.tensor([[9, 10]]), torch.arange(2)[None]
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        expected = target.forward(ids, positions, None)
        with codes.used():
            torch.testing.assert_close(target.forward(ids, positions, None), expected)
    (line,) = caplog.messages
    assert line == "layers are not compiled: no such thing"


def test_a_function_that_cannot_be_fused_is_called(caplog) -> None:
    def asks_the_device(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum().item() > 0 else x

    fused = Compiled(asks_the_device)
    with caplog.at_level(logging.WARNING):
        assert fused(torch.ones(2)).tolist() == [2, 2]
    assert "is not compiled: " in caplog.text
    assert fused(torch.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("name", "parts", "law"),
    [
        ("parallel:own", ("choose", "extend"), {}),
        more("parallel:own", ("choose", "extend"), DRAWN),
        more("eagle3:own", GROWTH, {}),
        more("eagle3:own", GROWTH, DRAWN),
    ],
)
def test_drafts_in_compiled_parts_are_those_of_eager_ones(
    name: str, parts: tuple[str, ...], law: dict[str, Any], make_drafter, monkeypatch
) -> None:
    """Traced alone, which finds what cannot be compiled; generating code takes a minute."""
    traced = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda *given, options, **how: traced(*given, **how))
    target = Target(tiny_llama(0, vocab_size=128, hidden_size=32))
    found = []
    for is_compiled in (False, True):
        drafter = make_drafter(name, target)
        fused = {part: Compiled(getattr(drafter, part)) for part in parts if is_compiled}
        vars(drafter).update(fused)
        decoder = Decoder(target, drafter, Budget(12, 3))
        result = decoder.generate(random_prompts(2), max_new_tokens=8, seed=1, **law)
        found.append((result.sequences, result.stats.accept_lengths))
        # Where compiling fails the function itself is called from then on.
        assert not [part for part, function in fused.items() if function.code == function.function]
    assert found[0] == found[1]


def test_a_function_of_too_many_kinds_is_called(caplog, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "MOST_VARIANTS", 1)
    fused = Compiled(lambda x, name: x + len(name))
    with caplog.at_level(logging.WARNING):
        found = [fused(torch.ones(2), name).tolist() for name in ("a", "ab", "abc")]
    assert found == [[2, 2], [3, 3], [4, 4]]
    assert "is not compiled: " in caplog.text


def test_the_largest_of_long_rows_are_found_by_our_kernel(monkeypatch) -> None:
    found: list[int] = []

    def stand_in(x: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(k)
        values, places = x.sort(dim, descending=True)
        return values[..., :k], places[..., :k]

    def is_long(x: torch.Tensor, k: int, dim: int = -1) -> bool:
        return x.shape[-1] > LONG

    rows = [Substitution(torch.Tensor.topk, stand_in, is_long)]
    monkeypatch.setattr(compiled, "LARGEST", Substituting(rows))

    def both(x: torch.Tensor) -> torch.Tensor:
        return x.topk(3)[0] + (x * 2)[:, :50].topk(3)[0]

    x = torch.randn(2, LONG + 1)
    torch.testing.assert_close(Compiled(both)(x), both(x))
    assert found == [3]


def test_products_of_the_same_rows_lie_side_by_side_and_stay_parameters(target: Target) -> None:
    layer = target.layers[0]
    before = {name: weight.clone() for name, weight in layer.named_parameters()}
    merged = MergedProducts(without_weights(layer))
    attention, size = layer.self_attn, target.config.hidden_size

    def merged_now() -> torch.Tensor:
        """The weights of queries, keys and values as one."""
        weights = merged.weights_of(layer)
        assert "self_attn.k_proj.weight" not in weights and "mlp.up_proj.weight" not in weights
        return weights["self_attn.q_proj.weight"]

    for name, weight in layer.named_parameters():
        assert weight.equal(before[name]), name
    assert merged_now()[:size].equal(before["self_attn.q_proj.weight"])
    assert merged_now().data_ptr() == attention.q_proj.weight.data_ptr()
    kept = attention.k_proj.weight
    attention.k_proj.weight = torch.nn.Parameter(torch.ones_like(kept))  # another model's, say
    assert merged_now()[size : size + len(kept)].eq(1).all()
    attention.k_proj.weight = kept
    assert merged_now()[size : size + len(kept)].equal(kept)


@pytest.mark.parametrize("is_wide", [True, False])
def test_the_input_of_a_wide_product_is_computed_once(
    is_wide: bool, target: Target, monkeypatch
) -> None:
    mlp, graphs = target.layers[0].mlp, []
    monkeypatch.setattr(merged_products, "WIDE", target.config.intermediate_size + (not is_wide))
    form = without_weights(mlp)
    merged = MergedProducts(form)

    def noting(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    @partial(torch.compile, fullgraph=True, backend=noting)
    def product(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        found = functional_call(form, weights, (x,))
        merged.forget()
        return found

    x = torch.randn(1, 1, target.config.hidden_size)
    with torch.no_grad():
        torch.testing.assert_close(product(merged.weights_of(mlp), x), mlp(x))
    assert ("in_memory" in graphs[0]) == is_wide


def test_neighbours_in_memory_of_two_allocations_are_moved() -> None:
    numbers = torch.arange(8.0).view(4, 2)
    products = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
    for product, half in zip(products, numbers.numpy().reshape(2, 2, 2), strict=True):
        product.weight.data = torch.from_numpy(half)  # a storage of its own, next to the other
    merged = side_by_side(products, "weight")
    assert merged is not None and merged.equal(numbers)
    assert side_by_side(products, "bias") is None


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        (None, "{home}/drafthead/compiled"),
        ("torch", "{home}/drafthead/compiled"),
        ("{home}/a", "{home}/a"),
    ],
)
def test_compiled_code_is_kept_where_a_restart_leaves_it_unless_the_user_chose_a_place(
    chosen, kept, tmp_path, monkeypatch
) -> None:
    """Importing torch's tracer writes its default, a temporary folder, into the variable."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if chosen is not None:
        place = default_cache_dir() if chosen == "torch" else chosen.format(home=tmp_path)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", place)
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == kept.format(home=tmp_path)


def test_compiled_code_stays_where_torch_puts_it_if_nothing_else_can_be_written(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()


def test_a_place_for_compiled_code_that_cannot_be_written_is_refused_in_one_sentence(
    tmp_path, monkeypatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file / "folder"))
    with pytest.raises(UserError, match=r"TORCHINDUCTOR_CACHE_DIR is .*folder.*unset it$"):
        keep_compiled_code()
