"""Hidden states as bytes: whole numbers from -127 to 127, and a scale for each position."""

import torch

from drafthead.heads.target.seven_bits import rounded

LEVELS = 127  # on either side of 0


def to_int8(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers [T, D] of hidden states [T, D] and the scales [T], in the type of the states.

    The states 0.5 -1.27 0.104 have the scale 0.01 and the numbers 50 -127 10.
    """
    numbers, scales = rounded(hidden, LEVELS)
    return numbers.to(torch.int8), scales.to(hidden.dtype)


def from_int8(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Hidden states [T, D] of numbers [T, D] and scales [T], in the type of the scales."""
    return numbers.to(scales.dtype) * scales[:, None]
