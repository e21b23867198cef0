"""The few largest of many numbers: torch's own choice, in the order of the places."""

import pytest
import torch

from drafthead.backends.cpu.kernels import library

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")


@pytest.mark.parametrize(("count", "size"), [(1, 5), (8, 4096), (64, 101)])
def test_places_are_those_of_a_stable_sort(count, size) -> None:
    torch.manual_seed(count)
    for rows in (1, 2, 5):
        x = torch.randn(rows, 3, size).bfloat16().float()  # rounded, so that many are equal
        expected = x.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        assert torch.equal(torch.ops.drafthead.top(x, count), expected)


def test_places_differ_even_where_most_numbers_are_minus_infinity() -> None:
    x = torch.full((1, 1, 40), -torch.inf)
    x[..., 33] = 1.0
    assert torch.ops.drafthead.top(x, 4).flatten().tolist() == [33, 0, 1, 2]
