"""Optimisers and learning-rate schedules, shared by head training and by the demo models."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from drafthead.core.substitution import Substituting, Substitution
from drafthead.core.target.processor import bfloat16_instructions
from drafthead.train.settings import OptimizerConfig


class Float32Muon(torch.optim.Muon):
    """torch's Muon, which orthogonalises in bfloat16, in float32 instead.

    For processors without instructions for bfloat16: there the optimizer took nine tenths of a
    step.
    """

    def step(self, closure: Any = None) -> Any:
        """One step, with arguments and value as torch has them."""
        with Substituting([IN_FLOAT32]):
            return super().step(closure)


# What torch's Muon does with a gradient first; the copy is changed in place.
IN_FLOAT32 = Substitution(
    torch.Tensor.bfloat16,
    partial(torch.Tensor.to, dtype=torch.float32, copy=True),
    lambda *_: True,
)


def muon_for(device: torch.device) -> type[torch.optim.Muon]:
    """The Muon for parameters on a device."""
    is_slow = device.type == "cpu" and not bfloat16_instructions()
    return Float32Muon if is_slow else torch.optim.Muon


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Tell whether Muon applies: a matrix that is neither an embedding nor an output projection."""
    is_table = any(part in name for part in ("embed", "lm_head", "output"))
    return parameter.ndim == 2 and not is_table


def build_optimizers(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> list[torch.optim.Optimizer]:
    """One AdamW, or for `muon` a Muon for the hidden matrices and an AdamW for the rest.

    Parameters without gradients are left out; raises ValueError if none is left.
    """
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    if not trained:
        raise ValueError("there is no parameter to train")
    matrices = [p for name, p in trained if config.name == "muon" and is_hidden_matrix(name, p)]
    in_muon = {id(p) for p in matrices}
    rest = [p for _, p in trained if id(p) not in in_muon]
    decay = config.weight_decay
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        muon = muon_for(matrices[0].device)
        optimizers.append(muon(matrices, lr=config.muon_lr, weight_decay=decay))
    if rest:
        optimizers.append(
            torch.optim.AdamW(rest, lr=config.lr, betas=config.betas, weight_decay=decay)
        )
    return optimizers


def lr_share(config: OptimizerConfig, progress: float) -> float:
    """The learning rate as a share of its peak when `progress` of the training is done.

    Linear warm-up, then the schedule. `progress` may count steps or time, so a run limited in
    minutes also reaches the schedule's end. With warmup_ratio 0.2 and `linear` to 0: 0.5 at
    progress 0.1, 1 at 0.2, 0.5 at 0.6, 0 at 1.
    """
    warmup = config.warmup_ratio
    if progress < warmup:
        return progress / warmup
    if config.schedule == "constant" or warmup == 1:
        return 1.0
    through = min(1.0, (progress - warmup) / (1 - warmup))
    fall = through if config.schedule == "linear" else (1 - math.cos(math.pi * through)) / 2
    return 1.0 - (1.0 - config.final_lr_ratio) * fall


def set_learning_rates(
    optimizers: Sequence[torch.optim.Optimizer], peaks: Sequence[float], share: float
) -> list[float]:
    """Give each optimiser `share` of its peak learning rate; returns the rates."""
    rates = [peak * share for peak in peaks]
    for optimizer, rate in zip(optimizers, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
    return rates
