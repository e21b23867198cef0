"""The loss of heads that guess depth by depth, token by token: each token's teacher is asked once.

The same token is guessed from several anchors, at a depth each. So the losses are computed for
tokens, not for anchors: of the tokens A B C D after root r, from anchors that lie one place apart::

    token                    A     B     C     D
    anchor of depth 1, 2    (0, -) (1, 0) (2, 1) (3, 2)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from drafthead.heads.base import MAX_RANK, HeadBatch, HeadLoss
from drafthead.heads.objectives.anchors import labels_at
from drafthead.heads.objectives.chunked import Part, summed_in_chunks

# From a depth's number, states [L, ...], the target's final states [L, D] and logits [L, V], and
# the true tokens [L]: the losses that training minimises, those of the tokens, and the ranks, [L].
Judge = Callable[
    [int, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor],
]


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


@dataclass(frozen=True)
class DepthLosses:
    """How the losses of all depths are computed and summed."""

    judge: Judge
    project: Callable[[torch.Tensor], torch.Tensor] | None  # the target's logits, if they are read
    weights: Sequence[float]  # of the depths
    num_logits: int  # V
    parameters: Sequence[torch.Tensor]  # that `judge` may read

    def of(
        self,
        batch: HeadBatch,
        rows: torch.Tensor,  # [A]
        anchors: torch.Tensor,  # [A]
        states: Sequence[torch.Tensor],  # [A, ...] of each depth
    ) -> HeadLoss:
        """The loss of a batch whose anchors have these states."""
        last = batch.features.last
        assert last is not None
        guessed = guessed_tokens(batch, rows, anchors, len(states))
        total, of_depths = summed_in_chunks(
            self._by_depth,
            self.num_logits,
            self.parameters,
            guessed.anchors >= 0,
            last.flatten(0, 1)[guessed.places],
            batch.input_ids.flatten()[guessed.places + 1],
            *(s[n.clamp_min(0)] for s, n in zip(states, guessed.anchors.unbind(1), strict=True)),
        )
        return self._gathered(total, of_depths, guessed, len(anchors))

    def _by_depth(
        self,
        valid: torch.Tensor,  # [L, K]
        teacher: torch.Tensor,  # [L, D]
        labels: torch.Tensor,  # [L]
        *states: torch.Tensor,  # [L, ...]
    ) -> Iterator[Part]:
        """For each depth the weighted sum [], the losses [L] of the tokens, and the ranks [L]."""
        target_logits = None
        if self.project is not None:
            with torch.no_grad():
                target_logits = self.project(teacher).float()  # once, not at each depth
        for index, state in enumerate(states):
            losses, token_losses, ranks = self.judge(index, state, teacher, target_logits, labels)
            here = valid[:, index]
            yield (
                self.weights[index] * losses.where(here, 0).sum(),
                token_losses.detach().where(here, 0),
                ranks.where(here, MAX_RANK),
            )

    def _gathered(
        self,
        total: torch.Tensor,  # []
        of_depths: Sequence[tuple[torch.Tensor, torch.Tensor]],  # losses and ranks [L] of each
        guessed: GuessedTokens,
        num_anchors: int,
    ) -> HeadLoss:
        """The loss of the batch, with the ranks by anchor instead of by token."""
        depth = len(self.weights)
        sums, counts = torch.zeros(2, depth, device=total.device)
        # Tokens that no anchor guesses have the number -1: what is of them goes to the last row.
        ranks = torch.full((num_anchors + 1, depth), MAX_RANK, device=total.device)
        for index, (losses, of_tokens) in enumerate(of_depths):
            numbers = guessed.anchors[:, index]
            sums[index], counts[index] = losses.sum(), (numbers >= 0).sum()
            ranks[numbers, index] = of_tokens
        return HeadLoss(total, sums, counts.long(), ranks[:num_anchors])
