"""The loss of heads that guess depth by depth, token by token: each token's teacher is asked once.

The same token is guessed from several anchors, at a depth each. So the losses are computed for
tokens, not for anchors: of the tokens A B C D after root r, from anchors that lie one place apart::

    token                    A     B     C     D
    anchor of depth 1, 2    (0, -) (1, 0) (2, 1) (3, 2)
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.heads.base import DraftHead
from drafthead.heads.layers.draft_vocabulary import DraftVocabulary
from drafthead.heads.objectives.anchors import labels_at
from drafthead.heads.objectives.batch import MAX_RANK, HeadBatch, HeadLoss
from drafthead.heads.objectives.chunked import Part, in_chunks
from drafthead.heads.objectives.losses import TOKEN_LOSSES


@dataclass(frozen=True)
class GuessedTokens:
    """The tokens that are guessed, and from which anchors."""

    places: torch.Tensor  # [L] in the flattened batch, of the position before each token
    anchors: torch.Tensor  # [L, K] numbers of the anchors that guess it at each depth, or -1


def guessed_tokens(
    batch: HeadBatch, rows: torch.Tensor, anchors: torch.Tensor, depth: int
) -> GuessedTokens:
    """The tokens that anchors [A] in rows [A] guess at depths 1 to `depth`."""
    length, size = batch.input_ids.shape[1], batch.input_ids.numel()
    numbers = torch.arange(len(anchors), device=anchors.device)
    table = torch.full((size + 1, depth), -1, device=anchors.device)
    for index in range(depth):
        valid, _ = labels_at(batch, rows, anchors, offset=index + 2)
        # The last row is for anchors without a token, and for nobody to read.
        before = (rows * length + anchors + index + 1).where(valid, size)
        table[before, index] = numbers
    places = (table[:size] >= 0).any(dim=1).nonzero()[:, 0]
    return GuessedTokens(places, table[places])


class HeadByDepth(DraftVocabulary, DraftHead):
    """A head that guesses each depth from one state for each anchor.

    Its config has `vocab_size`, `loss`, a name in TOKEN_LOSSES, and `num_heads`, which is the depth
    unless the head has another one.
    """

    def __init__(self, config: Any, draft_vocab_size: int = 0):
        super().__init__(config)
        self.add_draft_vocabulary(config.vocab_size, draft_vocab_size)

    @property
    def depth(self) -> int:
        return int(self.config.num_heads)

    @property
    def features_needed(self) -> FeatureSpec:
        return FeatureSpec(layers=(), last=True)

    @abstractmethod
    def token_logits(self, index: int, state: torch.Tensor, target: Target) -> torch.Tensor:
        """Logits [L, Vd] for the tokens of depth `index` + 1 from states [L, ...]."""

    def training_losses(
        self,
        states: torch.Tensor,  # [L, D]
        teacher: torch.Tensor,  # [L, D] final features that the target has at these positions
        token_losses: torch.Tensor,  # [L]
    ) -> torch.Tensor:
        """The losses [L] that training minimises: the token losses, unless a head adds others."""
        return token_losses

    def loss_by_depth(
        self,
        batch: HeadBatch,
        target: Target,
        anchors: tuple[torch.Tensor, torch.Tensor],  # rows [A] and positions [A]
        states: Sequence[torch.Tensor],  # [A, ...] of each depth
        weights: Sequence[float],  # of each depth, also of those that have no states here
    ) -> HeadLoss:
        """Sum over depths of weight x the losses of the tokens that anchors guess there."""
        rule = TOKEN_LOSSES[self.config.loss]
        guessed = guessed_tokens(batch, *anchors, len(states))

        @in_chunks(self.num_guesses, self.parameters())
        def losses(
            valid: torch.Tensor,  # [L, K]
            teacher: torch.Tensor,  # [L, D]
            labels: torch.Tensor,  # [L]
            *states: torch.Tensor,  # [L, ...]
        ) -> Iterator[Part]:
            """Of each depth: the weighted sum [] that is trained, token losses and ranks [L]."""
            teacher_logits = self.teacher_logits(teacher, target) if rule.reads_target else None
            for index, state in enumerate(states):
                logits = self.token_logits(index, state, target)
                token_losses, ranks = self.judged(logits, teacher_logits, labels, rule)
                trained = self.training_losses(state, teacher, token_losses)
                here = valid[:, index]
                loss = weights[index] * trained.where(here, 0).sum()
                yield loss, token_losses.where(here, 0), ranks.where(here, MAX_RANK)

        last = batch.features.last
        assert last is not None
        total, of_depths = losses(
            guessed.anchors >= 0,
            last.flatten(0, 1)[guessed.places],
            batch.input_ids.flatten()[guessed.places + 1],
            *(s[n.clamp_min(0)] for s, n in zip(states, guessed.anchors.unbind(1), strict=True)),
        )
        return by_anchor(total, of_depths, guessed, len(anchors[0]), len(weights))


def by_anchor(
    total: torch.Tensor,  # []
    of_depths: Sequence[tuple[torch.Tensor, torch.Tensor]],  # losses and ranks [L] of each
    guessed: GuessedTokens,
    num_anchors: int,
    depth: int,
) -> HeadLoss:
    """The loss of a batch, with the ranks by anchor instead of by token, of `depth` depths."""
    sums, counts = torch.zeros(2, depth, device=total.device)
    # Tokens that no anchor guesses have the number -1: what is of them goes to the last row.
    ranks = torch.full((num_anchors + 1, depth), MAX_RANK, device=total.device)
    for index, (losses, of_tokens) in enumerate(of_depths):
        numbers = guessed.anchors[:, index]
        sums[index], counts[index] = losses.sum(), (numbers >= 0).sum()
        ranks[numbers, index] = of_tokens
    return HeadLoss(total, sums, counts.long(), ranks[:num_anchors])
