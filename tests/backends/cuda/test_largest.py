"""The largest of rows; see conftest.py."""

import pytest
import torch

from drafthead.backends.cuda import largest as module
from drafthead.backends.cuda.largest import largest

DEVICE = "cpu" if not torch.cuda.is_available() else "cuda"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    """What an interpreter sorts in a second."""
    monkeypatch.setattr(module, "WIDTH", 32)


@pytest.mark.parametrize(("shape", "count"), [((1, 2, 90), 6), ((2, 80), 1)])
def test_the_largest_are_those_of_topk_and_of_equals_the_first(
    shape: tuple[int, ...], count: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE)
    x[..., 7], x[..., 70] = 9.0, 9.0  # equal, and larger than all others
    x[..., 50] = -torch.inf
    numbers, places = largest(x, count)
    expected = x.topk(count)
    torch.testing.assert_close(numbers, expected.values, rtol=0, atol=0)
    torch.testing.assert_close(x.gather(-1, places), numbers, rtol=0, atol=0)
    assert (places[..., 0] == 7).all()
    assert all(len(set(row.tolist())) == count for row in places.flatten(0, -2))


def test_bfloat16_and_rows_with_gaps_between_them() -> None:
    x = torch.randn(2, 60, device=DEVICE).bfloat16()[:, :40]
    numbers, places = largest(x, 4)
    torch.testing.assert_close(numbers, x.topk(4).values.float(), rtol=0, atol=0)
    assert (places < 40).all()
