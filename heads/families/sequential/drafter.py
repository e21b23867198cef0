"""Drafting with a sequential head: its cache, and the static trees that it fills."""

import torch

from drafthead.core.coupling import Choice
from drafthead.core.drafting.drafter import Committed, DraftSession, at_last
from drafthead.core.kv_cache.column_cache import CacheView
from drafthead.core.sampling import Sampling
from drafthead.core.trees.tree import Budget, TokenTree
from drafthead.heads.families.head_drafter import HeadDrafter, register_head_drafter
from drafthead.heads.families.late_reader import LateReader
from drafthead.heads.families.sequential.head import SequentialHead
from drafthead.heads.growing.levels import Guess, Nodes
from drafthead.heads.layers.cache import DraftCache


@register_head_drafter(SequentialHead)
class SequentialDrafter(HeadDrafter[SequentialHead]):
    """A sequential head that fills static trees."""

    def read(
        self,
        hidden: torch.Tensor,  # [B, T, D]
        positions: torch.Tensor,  # [B or 1, T]
        mask: torch.Tensor,  # [B or 1, 1, T, S]
        view: CacheView,  # T columns
    ) -> torch.Tensor:
        """First states [B, T, S] at new positions, whose keys and values go into the cache."""
        return self.head.read(hidden, positions, mask, view.opened())

    def step(self, index: int, states: torch.Tensor, tokens: torch.Tensor) -> Guess:
        """States [B, n, S'] of nodes of depth `index`, and the guesses of their children.

        `states` [B, n, S] are those of their parents, `tokens` [B, n] their own tokens.
        """
        states = self.head.advance(states, tokens, index, self.target)
        return self.guess(states, self.head.token_logits(index, states, self.target))

    def session(self, rows: int) -> DraftSession:
        return SequentialSession(self, rows)


class SequentialSession(LateReader):
    """A sequential head at work: a first state for each row, and the head's cache."""

    row_state = (*LateReader.row_state, "cache", "state")

    def __init__(self, drafter: SequentialDrafter, rows: int):
        super().__init__(drafter.memory)
        self.drafter = drafter
        self.cache = drafter.head.new_cache(rows, drafter.memory)
        self.state: torch.Tensor | None = None  # [B, S], where the root was predicted

    @torch.no_grad()
    def read(self, committed: Committed) -> None:
        if self.cache is None:
            hidden = committed.ends.hidden
            assert hidden is not None
            self.state = self.drafter.head.start(hidden)
        else:
            self.state = self._read_into(self.cache, committed)

    def _read_into(self, cache: DraftCache, committed: Committed) -> torch.Tensor:
        """First states [B, S] after what was committed."""
        hidden, nodes, lengths = committed.features.last, committed.tokens, committed.lengths
        assert hidden is not None
        count = nodes.shape[1]
        steps = torch.arange(count, device=nodes.device)
        mask = cache.mask((steps[:, None] >= steps)[None])
        is_prompt = self.drafter.is_prompt(cache, count)
        read = self.drafter.reading(self.drafter.read, is_prompt)
        states = read(hidden, cache.positions(count), mask, cache.view(count))
        cache.keep_pending(count)
        cache.commit_first(lengths, committed.counts)
        return at_last(states, lengths)

    @torch.no_grad()
    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> TokenTree:
        self.catch_up()
        assert self.state is not None and self.roots is not None
        states = self.state[:, None]
        return self.drafter.filled(budget, self.roots, states, self.expand, sampling, random)

    def expand(self, nodes: Nodes) -> Guess:
        """The guesses [B, n, k] of the children of nodes of one depth."""
        step = self.drafter.whole(self.drafter.step)
        return step(nodes.depth, nodes.states, nodes.tokens)
