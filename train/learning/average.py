"""An exponential moving average of a head's weights, which is steadier than the last weights."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from drafthead.heads.base import DraftHead


def decay_of_step(decay: float, step: int) -> float:
    """The decay of a step, counted from 0, that lets a short run forget its random start.

    min(decay, (1 + step) / (10 + step)), as TensorFlow's ExponentialMovingAverage has it with
    `num_updates`: with 0.999 that is 0.1, 0.18, 0.25 and, from step 8990 on, 0.999.
    """
    return min(decay, (1 + step) / (10 + step))


class WeightAverage:
    """The average of the weights of a head that is being trained, in float32, and its head."""

    def __init__(self, head: DraftHead, decay: float, device: torch.device):
        """Begin with the head's weights as they are."""
        self.decay = decay
        self.head = copy.deepcopy(head).to(device, torch.float32).requires_grad_(False)

    def update(self, trained: nn.Module, step: int) -> None:
        """Take in the weights after a step, counted from 0; `trained` is the head itself."""
        average = get_ema_multi_avg_fn(decay_of_step(self.decay, step))
        # DeepSpeed's are rounded to bfloat16; they are averaged in float32 all the same.
        weights = [weight.detach().float() for weight in trained.parameters()]
        average(list(self.head.parameters()), weights, step)
