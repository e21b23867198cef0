"""The moving average of a head's weights."""

import pytest
import torch
from tiny import tiny_llama

from drafthead.core.target.target import Target
from drafthead.train.learning.step import WeightAverage, decay_of_step
from drafthead.train.run.trainables import new_head, trainable


def test_the_decay_grows_from_a_tenth_to_what_was_asked_for() -> None:
    assert [decay_of_step(0.5, step) for step in (0, 1, 7, 8, 1000)] == [
        *(0.1, 2 / 11, 8 / 17, 0.5, 0.5)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_moves_towards_the_weights_in_float32(
    trainable_family: str, dtype: torch.dtype
) -> None:
    """Weights of 1, then 2, then 4; whatever the trained weights are rounded to."""
    target = Target(tiny_llama(vocab_size=200))
    config = trainable(trainable_family).config_class()
    head = new_head(trainable_family, config, target, torch.ones(200, dtype=torch.long))
    with torch.no_grad():
        for weight in head.parameters():
            weight.fill_(1)
    average = WeightAverage(head, 0.15, torch.device("cpu"))
    head = head.to(dtype)
    for step, value in enumerate((2.0, 4.0)):
        with torch.no_grad():
            for weight in head.parameters():
                weight.fill_(value)
        average.update(head, step)
    # 0.1 * 1 + 0.9 * 2 = 1.9, and 0.15 * 1.9 + 0.85 * 4 = 3.685.
    for weight in average.head.parameters():
        assert weight.dtype == torch.float32 and not weight.requires_grad
        torch.testing.assert_close(weight, torch.full_like(weight, 3.685))
    assert all((weight == 4).all() for weight in head.parameters())
