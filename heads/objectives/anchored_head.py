"""Heads that learn from anchors: each depth guesses from one vector for each anchor."""

from abc import abstractmethod
from collections.abc import Iterable
from functools import partial

import torch

from drafthead.heads.base import MAX_RANK, DraftHead, HeadBatch, HeadLoss
from drafthead.heads.objectives.anchors import anchor_positions
from drafthead.heads.objectives.by_depth import DepthLosses
from drafthead.heads.objectives.losses import TOKEN_LOSSES, depth_weights, ranks_of
from drafthead.heads.target.target import Target


class AnchoredHead(DraftHead):
    """A head that guesses each depth from one vector for each anchor.

    Its config has `loss`, a name in TOKEN_LOSSES, and `depth_decay`.
    """

    @abstractmethod
    def states(
        self, batch: HeadBatch, rows: torch.Tensor, anchors: torch.Tensor, target: Target
    ) -> Iterable[torch.Tensor]:
        """For each depth the vectors [A, ...] at anchors [A] in rows [A], after the true tokens."""

    @abstractmethod
    def logits(self, state: torch.Tensor, index: int, target: Target) -> torch.Tensor:
        """Logits [..., V] for the token of depth index + 1 from state [..., S]."""

    def loss(self, batch: HeadBatch, target: Target) -> HeadLoss:
        """Sum over depths k of depth_decay^(k-1) x the token loss of the tokens of depth k."""
        rows, anchors = anchor_positions(batch)
        reads_target = TOKEN_LOSSES[self.config.loss].reads_target
        return DepthLosses(
            judge=partial(self._judge, target),
            project=target.project if reads_target else None,
            weights=depth_weights(self.config.depth_decay, self.depth),
            num_logits=target.vocab_size,
            parameters=list(self.parameters()),
        ).of(batch, rows, anchors, list(self.states(batch, rows, anchors, target)))

    def _judge(
        self,
        target: Target,
        index: int,
        state: torch.Tensor,  # [L, ...]
        teacher: torch.Tensor,  # [L, D]
        target_logits: torch.Tensor | None,  # [L, V]
        labels: torch.Tensor,  # [L]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """At one depth the losses [L], twice, and the ranks [L] of the true tokens."""
        logits = self.logits(state, index, target)
        losses = TOKEN_LOSSES[self.config.loss].function(logits, target_logits, labels)
        return losses, losses, ranks_of(logits, labels, MAX_RANK)
