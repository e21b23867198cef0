"""Columns of a cache, moved in every layer at once."""

from collections.abc import Sequence

import torch


def move_columns(
    keys: Sequence[torch.Tensor],  # of each layer [B, H, capacity, D]
    values: Sequence[torch.Tensor],  # as keys
    source: torch.Tensor,  # [B, P]
    destination: torch.Tensor,  # [B, P]
) -> None:
    """Copy each row's columns `source`, which ascend, to `destination`, none after its source.

    Source 4 6 and destination 4 5 turn columns ``. . . . a b c`` into ``. . . . a c c``.
    """
    rows = torch.arange(source.shape[0], device=source.device)[:, None]
    for layer in (*keys, *values):
        layer[rows, :, destination] = layer[rows, :, source]
