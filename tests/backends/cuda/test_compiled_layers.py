"""Decoder layers compiled one by one, as recorded passes on a GPU run them; here for a CPU."""

import logging

import pytest
import torch
import torch._dynamo.utils
from tiny import tiny_llama

from drafthead.backends.cuda import compiled_layers
from drafthead.backends.cuda.compiled_layers import CompiledLayers, Fused, Together
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.target.hooks import Taps
from drafthead.heads.target.target import Target
from drafthead.heads.target.tree_cache import StepCache

LAYERS = 4


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
    assert line == "layers are recorded as they are, uncompiled: no such thing"


def test_a_function_that_cannot_be_fused_is_called(caplog) -> None:
    def asks_the_device(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum().item() > 0 else x

    fused = Fused(asks_the_device)
    with caplog.at_level(logging.WARNING):
        assert fused(torch.ones(2)).tolist() == [2, 2]
    assert "is recorded as it is" in caplog.text
    assert fused(torch.zeros(2)).tolist() == [0, 0]


def test_a_function_of_too_many_kinds_is_called(caplog, monkeypatch) -> None:
    monkeypatch.setattr(compiled_layers, "MOST_VARIANTS", 1)
    fused = Fused(lambda x, name: x + len(name))
    with caplog.at_level(logging.WARNING):
        found = [fused(torch.ones(2), name).tolist() for name in ("a", "ab", "abc")]
    assert found == [[2, 2], [3, 3], [4, 4]]
    assert "is recorded as it is" in caplog.text
