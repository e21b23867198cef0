"""Accepted columns are moved in every layer, and nothing else is touched."""

import pytest
import torch

from drafthead.backends.cpu.kernels import library
from drafthead.core.kv_cache.column_cache import move_columns

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")

LAYERS = [(2, 24, 32), (1, 24, 8)]  # heads, columns and size of a head: layers may differ


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
def test_columns_are_moved_in_place_in_every_layer(source, destination) -> None:
    source, destination = torch.tensor(source), torch.tensor(destination)
    found, expected = (([*filled(len(source))], [*filled(len(source))]) for _ in range(2))
    torch.ops.drafthead.move_columns(*found, source, destination)
    move_columns(*expected, source, destination)
    for layers, wanted in zip(found, expected, strict=True):
        for moved, other in zip(layers, wanted, strict=True):
            assert torch.equal(moved, other)
