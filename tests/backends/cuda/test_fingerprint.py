"""Which decoder layers share compiled code."""

import pytest
import torch
from torch import nn

from drafthead.backends.cuda.fingerprint import UndescribedError, described, digest


class Scaled(nn.Module):
    """A model of one weight matrix and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.factor = 2


def name_of(model: nn.Module) -> str | None:
    """The digest of its description; None where it has none."""
    try:
        return digest(described(model))
    except UndescribedError:
        return None


@pytest.mark.parametrize("change", ["class", "attribute", "shape", "type", "layout", "hook"])
def test_another_model_is_another_and_one_of_other_numbers_the_same(change: str) -> None:
    model, before = Scaled().requires_grad_(False), name_of(Scaled().requires_grad_(False))
    assert before is not None and name_of(model) == before, "of other weights"
    if change == "class":
        model.linear.__class__ = type("Other", (nn.Linear,), {"__module__": __name__})
    elif change == "attribute":
        model.factor = 3
    elif change == "shape":
        model.linear.weight = nn.Parameter(torch.zeros(5, 4), requires_grad=False)
    elif change == "type":
        model.to(torch.float64)
    elif change == "layout":
        model.linear.weight = nn.Parameter(torch.zeros(4, 4).T, requires_grad=False)
    else:
        model.linear.register_forward_hook(lambda *_: None)
    assert name_of(model) != before
