"""What a norm of the target multiplies by, whatever class of norm it is."""

import torch
from torch import nn

from drafthead.heads.target.target import Target


@torch.no_grad()
def scale_of(norm: nn.Module, target: Target) -> torch.Tensor:
    """The factor [D] by which a norm of the target multiplies each of D normalised numbers.

    The norm is probed, because models differ in how they store this factor: in Gemma the weight is
    the factor minus 1. A vector of ones and minus ones is normalised already, and the difference
    between the norm of it and of its opposite is free of any bias.
    """
    signs = 1 - 2 * (torch.arange(target.hidden_size) % 2)
    signs = signs.to(target.device, target.dtype)
    return (norm(signs) - norm(-signs)) / 2 * signs
