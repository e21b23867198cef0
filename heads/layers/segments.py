"""Packed rows: conversations that share a row, each of which sees itself alone.

`segments` [B, T] numbers the conversations of a row from 1 and is 0 on padding.
"""

import torch

from drafthead.core.kv_cache.column_cache import additive


def seen_in_segments(segments: torch.Tensor) -> torch.Tensor:
    """The positions that each sees, bool [B, T, T]: those up to itself in its segment [B, T].

    Padding counts as one more segment, so that no row of a mask is empty.
    """
    return (segments[:, :, None] == segments[:, None, :]).tril()


def segment_mask(segments: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Causal mask [B, 1, T, T] inside each segment [B, T]: 0 to attend, else the lowest number."""
    return additive(seen_in_segments(segments)[:, None], dtype)


def positions_in_segments(segments: torch.Tensor) -> torch.Tensor:
    """Position ids [B, T] that start from 0 in each segment; `segments` is [B, T].

    Segments 1 1 1 2 2 0 have the positions 0 1 2 0 1 0.
    """
    places = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - places.where(starts, 0).cummax(dim=1).values
