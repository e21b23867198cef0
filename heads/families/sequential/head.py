"""Heads that draft depth by depth, each guess knowing the tokens drafted before it.

A state holds what is known at a node: `advance` adds the node's token to its parent's state, and
`token_logits` guesses the node's children from the result. On a static tree one batched call of
each fills a whole depth, and the children of every node are guessed after its real path.
"""

from abc import abstractmethod

import torch

from drafthead.core.kv_cache.column_cache import CacheColumns, FreshMemory
from drafthead.core.target.target import Target
from drafthead.heads.families.by_depth import HeadByDepth
from drafthead.heads.layers.cache import DraftCache
from drafthead.heads.objectives.anchors import anchor_positions, labels_at
from drafthead.heads.objectives.batch import HeadBatch, HeadLoss
from drafthead.heads.objectives.losses import depth_weights


class SequentialHead(HeadByDepth):
    """A head whose state grows with the drafted path; the first state comes from the target."""

    def contexts(self, hidden: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """First states [B, T, S] of packed rows, from hidden [B, T, D] and segments [B, T]."""
        return self.start(hidden)

    def new_cache(self, rows: int, memory: FreshMemory) -> DraftCache | None:
        """The cache in which `read` remembers committed positions; None for a head without one."""
        return None

    def read(
        self,
        hidden: torch.Tensor,  # [B, T, D]
        positions: torch.Tensor,  # [B or 1, T]
        mask: torch.Tensor,  # [B or 1, 1, T, S] bool
        cached: CacheColumns,
    ) -> torch.Tensor:
        """First states [B, T, S] at newly committed positions, for a head with a cache."""
        raise NotImplementedError

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """First states [..., S] from hidden [..., D] at the same positions."""
        return hidden

    @abstractmethod
    def advance(
        self, state: torch.Tensor, tokens: torch.Tensor, index: int, target: Target
    ) -> torch.Tensor:
        """The states [..., S'] of nodes of depth `index` with tokens [...].

        `state` [..., S] are those of their parents, or first states for the root.
        """

    def loss(self, batch: HeadBatch, target: Target) -> HeadLoss:
        """Sum over depths k of depth_decay^(k-1) x the loss of the tokens of depth k.

        The state of an anchor takes in the true tokens after it, depth by depth.
        """
        assert batch.features.last is not None
        anchors = anchor_positions(batch)
        state = self.contexts(batch.features.last, batch.segments)[anchors]
        states: list[torch.Tensor] = []
        for index in range(self.depth):
            _, tokens = labels_at(batch, *anchors, index + 1)
            state = self.advance(state, tokens, index, target)
            states.append(state)
        weights = depth_weights(self.config.depth_decay, self.depth)
        return self.loss_by_depth(batch, target, anchors, states, weights)
