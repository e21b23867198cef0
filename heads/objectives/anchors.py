"""Heads that learn from anchors: the positions from which they draft.

The token after an anchor is the root, and after the root come the tokens of depth 1, 2, ... For the
ids ``p q A B C`` with A B C supervised, q is the anchor of root A (depth 1 is B, depth 2 is C) and
A the anchor of root B (depth 1 is C).
"""

from abc import abstractmethod
from collections.abc import Iterable
from functools import partial

import torch

from drafthead.heads.base import MAX_RANK, DraftHead, HeadBatch, HeadLoss
from drafthead.heads.objectives.losses import TOKEN_LOSSES, depth_weights, in_chunks, ranks_of
from drafthead.heads.target.target import Target


def is_anchor(batch: HeadBatch) -> torch.Tensor:
    """Which positions [B, T - 1] are anchors: the next token is a root, in the same segment."""
    same = batch.segments[:, 1:] == batch.segments[:, :-1]
    roots = batch.supervised if batch.roots is None else batch.supervised & batch.roots
    return roots[:, 1:] & same


def anchor_positions(batch: HeadBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [A] and positions [A] of the anchors, row by row."""
    rows, anchors = is_anchor(batch).nonzero(as_tuple=True)
    return rows, anchors


def tokens_at(
    batch: HeadBatch, rows: torch.Tensor, anchors: torch.Tensor, offset: int
) -> torch.Tensor:
    """The token [A] `offset` places after anchors [A] in rows [A]; any token past the row's end."""
    return batch.input_ids[rows, (anchors + offset).clamp_max(batch.input_ids.shape[1] - 1)]


def labels_at(
    batch: HeadBatch, rows: torch.Tensor, anchors: torch.Tensor, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which anchors [A] have a supervised token `offset` places after them, and the tokens [A].

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
        hidden = batch.features.last
        assert hidden is not None
        rows, anchors = anchor_positions(batch)
        losses, counts, ranks = [], [], []
        for index, state in enumerate(self.states(batch, rows, anchors, target)):
            valid, labels = labels_at(batch, rows, anchors, offset=index + 2)
            # The target predicts a label one place before it.
            teacher = hidden[rows[valid], anchors[valid] + index + 1]
            depth_losses, depth_ranks = in_chunks(
                partial(self._judge, index, target),
                target.vocab_size,
                state[valid],
                teacher,
                labels[valid],
            )
            losses.append(depth_losses.sum())
            counts.append(valid.sum())
            ranks.append(torch.full_like(labels, MAX_RANK).masked_scatter(valid, depth_ranks))
        weights = depth_weights(self.config.depth_decay, self.depth)
        total = torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum()
        return HeadLoss(
            total=total,
            depth_losses=torch.stack(losses).detach(),
            depth_counts=torch.stack(counts),
            ranks=torch.stack(ranks, dim=1),
        )

    def _judge(
        self,
        index: int,
        target: Target,
        state: torch.Tensor,  # [A, ...]
        teacher: torch.Tensor,  # [A, D]
        labels: torch.Tensor,  # [A]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses [A] at one depth, and the ranks [A] of the true tokens among the guesses."""
        logits = self.logits(state, index, target)
        ranks = ranks_of(logits, labels, MAX_RANK)
        rule = TOKEN_LOSSES[self.config.loss]
        target_logits = target.project(teacher) if rule.reads_target else None
        return rule.function(logits, target_logits, labels), ranks
