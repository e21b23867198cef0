"""The input of a head's training and measurement: a batch of sequences, and its loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from drafthead.core.target.features import Features

# Guesses beyond this rank are never put into a tree.
MAX_RANK = 10
UNREAD = Features(last=None)


@dataclass(frozen=True)
class HeadBatch:
    """Token sequences for training and for measuring, once read with the target's features.

    Several conversations may share a row: `segments` numbers them from 1 and is 0 on padding.
    """

    input_ids: torch.Tensor  # [B, T]
    segments: torch.Tensor  # [B, T]
    supervised: torch.Tensor  # [B, T] bool: this token is a training target
    features: Features = UNREAD  # [B, T, D] of the target at these positions
    seeds: Sequence[int] | None = None  # [B] of what is drawn for each row; None: torch's own

    def uniform(self) -> torch.Tensor:
        """A random number in [0, 1) for each token [B, T].

        With seeds it depends on the seed of its row alone, not on other rows nor on padding.
        """
        ids = self.input_ids
        if self.seeds is None:
            return torch.rand(ids.shape, device=ids.device)
        streams = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        rows = [torch.rand(ids.shape[1], generator=stream) for stream in streams]
        return torch.stack(rows).to(ids.device)

    def to(self, device: torch.device) -> "HeadBatch":
        """These tokens on `device`; features stay where they are."""
        ids, segments = self.input_ids.to(device), self.segments.to(device)
        supervised = self.supervised.to(device)
        return replace(self, input_ids=ids, segments=segments, supervised=supervised)


@dataclass(frozen=True)
class HeadLoss:
    """The loss of a batch, in total and by depth.

    Depth k guesses the k-th token after the root. `ranks` are the head's ranks of the true tokens:
    0 for its best guess, and MAX_RANK for any rank from MAX_RANK on, for a position past the end,
    and for a depth that this loss does not use.
    """

    total: torch.Tensor  # scalar, summed over positions and weighted over depths
    depth_losses: torch.Tensor  # [K], detached sums
    depth_counts: torch.Tensor  # [K] positions that have a true token at that depth
    ranks: torch.Tensor  # [A, K] for the A positions that have a root
