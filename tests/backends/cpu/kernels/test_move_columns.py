"""Accepted columns, compiled: moved in every layer, and nothing else is touched."""

import pytest
import torch

from drafthead.backends.compiled import Compiled, has_kernels
from drafthead.backends.cpu.substitutions import replacement_of
from drafthead.core.kv_cache.column_cache import move_columns

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no kernels for this processor")

LAYERS = [(2, 24, 32), (1, 24, 8)]  # heads, columns and size of a head: layers may differ


def compiled() -> Compiled:
    """The function as steps have it: after columns that the pass has just written."""
    move = replacement_of(move_columns, has_kernels=True)

    def step(keys, values, written, source, destination) -> torch.Tensor:
        for layer in (*keys, *values):
            layer.index_copy_(2, written, torch.ones_like(layer[:, :, : written.shape[0]]))
        move(keys, values, source, destination)
        return source + 1

    layers, places = "B . . .", "B P"
    dims = {"keys": layers, "values": layers, "written": "P"}
    dims |= {"source": places, "destination": places}
    return Compiled(step, torch.device("cpu"), torch.bfloat16, dims)


def filled(rows: int) -> list[torch.Tensor]:
    """Random layers, which every call makes alike."""
    torch.manual_seed(0)
    return [torch.randn(rows, *layer).bfloat16() for layer in LAYERS]


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ([[9, 12, 14]], [[8, 9, 10]]),
        ([[8, 9, 10]], [[8, 9, 10]]),
        ([[8, 11]], [[8, 9]]),
        ([[9, 10, 12], [8, 11, 9], [10, 8, 9]], [[8, 9, 10], [7, 8, 9], [7, 8, 9]]),
    ],
)
def test_columns_are_moved_in_place_in_every_layer(source, destination, sizes_rendered) -> None:
    rendered = sizes_rendered("move_columns")
    source, destination = torch.tensor(source), torch.tensor(destination)
    written = 8 + torch.arange(source.shape[1])
    keys, values = filled(len(source)), filled(len(source))
    expected_keys, expected_values = filled(len(source)), filled(len(source))
    for layer in (*expected_keys, *expected_values):
        layer.index_copy_(2, written, torch.ones_like(layer[:, :, : source.shape[1]]))
    move_columns(expected_keys, expected_values, source, destination)
    with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):
        compiled()(keys, values, written, source, destination)
    assert rendered
    for moved, expected in zip((*keys, *values), (*expected_keys, *expected_values), strict=True):
        assert torch.equal(moved, expected)
