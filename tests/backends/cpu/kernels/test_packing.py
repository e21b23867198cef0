"""Which packed copy belongs to which weights, on any processor."""

import pytest
import torch
from torch import nn

from drafthead.backends.cpu.kernels.packing import pack


@pytest.mark.parametrize("paired", [False, True])
def test_weights_are_not_found_again_by_the_sum_of_their_bits(paired) -> None:
    """Rows that change places in one weight, or between two that are packed together."""
    first, second = (nn.Parameter(torch.randn(32, 8).bfloat16(), False) for _ in range(2))
    before = pack([first, second], paired)
    assert pack([first, second], paired).data_ptr() == before.data_ptr(), "found again"
    with torch.no_grad():
        first[[0, 1]] = first[[1, 0]].clone()
    swapped = pack([first, second], paired)
    assert not swapped.equal(before)
    first.data[[2, 3]] = first.data[[3, 2]]  # no version counts that
    again = pack([first, second], paired)
    assert not again.equal(swapped)
    first.data[:, [0, 1]] = first.data[:, [1, 0]]
    assert not pack([first, second], paired).equal(again)
    replaced = nn.Parameter(second[[1, 0, *range(2, 32)]].clone(), False)
    assert not pack([first, replaced], paired).equal(swapped)
