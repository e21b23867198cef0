"""Anchors: the positions from which heads draft, and what they are to guess there.

The token after an anchor is the root, and after the root come the tokens of depth 1, 2, ... For the
ids ``p q A B C`` with A B C supervised, q is the anchor of root A (depth 1 is B, depth 2 is C) and
A the anchor of root B (depth 1 is C).
"""

import torch

from drafthead.heads.objectives.batch import HeadBatch


def is_anchor(batch: HeadBatch) -> torch.Tensor:
    """Tell which positions [B, T - 1] are anchors: a root of the same segment comes next."""
    same = batch.segments[:, 1:] == batch.segments[:, :-1]
    return batch.supervised[:, 1:] & same


def anchor_positions(batch: HeadBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [A] and positions [A] of the anchors, row by row."""
    rows, anchors = is_anchor(batch).nonzero(as_tuple=True)
    return rows, anchors


def labels_at(
    batch: HeadBatch, rows: torch.Tensor, anchors: torch.Tensor, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tell which anchors [A] have a supervised token `offset` places on, and the tokens [A].

    A token of another segment does not count; where there is none, the token is any token.
    """
    length = batch.input_ids.shape[1]
    places = (anchors + offset).clamp_max(length - 1)
    valid = (
        (anchors + offset < length)
        & (batch.segments[rows, places] == batch.segments[rows, anchors])
        & batch.supervised[rows, places]
    )
    return valid, batch.input_ids[rows, places]
