"""The few largest of many logits: torch's own choice, in the order of the places."""

import pytest
import torch

from drafthead.backends.cpu.kernels import library
from drafthead.core import sampling

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "size"), [(1, 5), (8, 4096), (64, 101), (64, 40)])
def test_places_are_those_of_a_stable_sort(count, size, dtype) -> None:
    torch.manual_seed(count)
    for rows in (1, 2, 5):
        x = torch.randn(rows, 3, size).bfloat16().to(dtype)  # rounded, so that many are equal
        values, places, total = torch.ops.drafthead.largest_logits(x, count)
        expected = x.float().sort(dim=-1, descending=True, stable=True)
        assert torch.equal(places, expected.indices[..., :count])
        best, _, its_total = sampling.largest(x, count)
        assert torch.equal(values, best) and torch.allclose(total, its_total, atol=1e-5)


def test_places_differ_even_where_most_numbers_are_minus_infinity() -> None:
    x = torch.full((1, 1, 40), -torch.inf)
    x[..., 33] = 1.0
    assert torch.ops.drafthead.largest_logits(x, 4)[1].flatten().tolist() == [33, 0, 1, 2]


@pytest.mark.parametrize("size", [1, 7, 16, 1029, 49152])
def test_the_most_probable_is_the_first_of_the_largest(size) -> None:
    torch.manual_seed(size)
    x = torch.randn(3, 4, size).bfloat16()  # so few digits that many are equal
    x[0, 0], x[0, 1] = -torch.inf, -7.0
    x[0, 2, size // 2], x[0, 3, -1], x[1, 0, size // 2 :] = torch.nan, torch.inf, x[1, 0].max()
    expected = x.float().argmax(-1)
    assert expected[0, 1] == 0 and expected[0, 3] == size - 1
    expected[0, 0] = expected[0, 2] = sampling.NO_TOKEN
    for some in (slice(None), slice(1, 2)):
        found = torch.ops.drafthead.most_probable(x[:, some])
        assert torch.equal(found, expected[:, some])
        assert torch.equal(sampling.most_probable(x[:, some]), found)
