"""Logits of chosen tokens are those among all logits."""

import pytest
import torch
from tiny import tiny_llama
from torch import nn

from drafthead.heads.target.target import Target

CHOSEN = torch.tensor([5, 0, 63])


class Adapted(nn.Linear):
    """An output head that is more than its matrix, as with an adapter."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + hidden.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", ["plain", "bias", "adapted", "scaled and capped"])
def test_logits_of_chosen_tokens_are_those_among_all(kind: str) -> None:
    target = Target(tiny_llama())
    plain = target.output_head
    if kind in ("bias", "adapted"):
        linear = nn.Linear if kind == "bias" else Adapted
        target.output_head = linear(plain.in_features, plain.out_features)
    if kind == "scaled and capped":
        target.logit_scale, target.logit_cap = 0.5, 2.0
    hidden = torch.randn(2, 3, target.hidden_size)
    torch.testing.assert_close(target.project(hidden, CHOSEN), target.project(hidden)[..., CHOSEN])
