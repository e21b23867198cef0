"""Weights of seven bits: whole numbers from -63 to 63 and a scale for each row of a matrix.

Seven and not eight, as the bfloat16 numbers from 128 to 255 are those whose last seven bits count:
a kernel makes them of bytes by adding bits that are the same for all.
"""

import torch
from torch import nn

LEVELS = 63  # on either side of 0
MULTIPLE = 8  # of values in a row, for the kernel


def rounded(weight: torch.Tensor, levels: int = LEVELS) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole numbers of a weight [..., K], as float32, and the scales [...] of its rows.

    Numbers reach from -`levels` to `levels`. A row 0.4 -0.26 1.0 has the scale 1 / 63 and the
    numbers 25 -16 63.
    """
    values = weight.float()
    scales = values.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / levels
    return (values / scales[..., None]).round(), scales


def can_be_rounded(module: nn.Module) -> bool:
    """Whether a module is a matrix product whose rows the kernel can read."""
    return isinstance(module, nn.Linear) and module.in_features % MULTIPLE == 0


@torch.no_grad()
def round_matrices(model: nn.Module) -> None:
    """Replace the weights of all matrix products of a model by their rounded ones.

    Embeddings that share their weights with the output head are rounded with it.
    """
    for module in model.modules():
        if can_be_rounded(module):
            weight: torch.Tensor = module.weight  # type: ignore[assignment]
            numbers, scales = rounded(weight)
            weight.copy_(numbers * scales[..., None])
