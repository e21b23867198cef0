"""Drafting with a sequential head: its cache, and the static trees that it fills."""

from collections.abc import Callable
from functools import partial

import torch

from drafthead.core.coupling import Choice
from drafthead.core.dims import Spec
from drafthead.core.drafting.drafter import Committed, DraftSession, at_last
from drafthead.core.kv_cache.column_cache import CacheView, dims_of_view
from drafthead.core.sampling import Sampling
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.heads.families.head_drafter import HeadDrafter, register_head_drafter
from drafthead.heads.families.late_reader import LateReader
from drafthead.heads.families.sequential.head import SequentialHead
from drafthead.heads.growing.levels import Guesses, Level, filled_tree
from drafthead.heads.layers.cache import DraftCache

READING: dict[str, Spec] = {
    "hidden": "B T .",
    "positions": "B T",
    "mask": "B . T S",
    "view": dims_of_view("T"),
}
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # states, logits, ids of a level


@register_head_drafter(SequentialHead)
class SequentialDrafter(HeadDrafter[SequentialHead]):
    """A sequential head that fills static trees."""

    def __init__(self, head: SequentialHead, target: Target, shape: TreeShape | None):
        """Raises UserError when the tree is deeper than the head drafts."""
        super().__init__(head, target, shape)
        self.read: Callable[..., torch.Tensor] = self.read_eagerly
        self.steps: list[Callable[..., State]] = [
            partial(self._step, index) for index in range(head.depth)
        ]

    def read_eagerly(
        self,
        hidden: torch.Tensor,  # [B, T, D]
        positions: torch.Tensor,  # [B or 1, T]
        mask: torch.Tensor,  # [B or 1, 1, T, S]
        view: CacheView,  # T columns
    ) -> torch.Tensor:
        """First states [B, T, S] at new positions, whose keys and values go into the cache."""
        return self.head.read(hidden, positions, mask, view.opened())

    def _step(self, index: int, states: torch.Tensor, tokens: torch.Tensor) -> State:
        """States [B, n, S'] of nodes of depth `index`, and the guesses of their children.

        `states` [B, n, S] are those of their parents, `tokens` [B, n] their own tokens.
        """
        states = self.head.advance(states, tokens, index, self.target)
        return states, *self.best_guesses(self.head.token_logits(index, states, self.target))

    def compile(self, target: Target | None = None) -> None:
        self.prepare(target)
        self.read = self.compiled(self.read_eagerly, READING)
        step = {"states": "B n .", "tokens": "B n"}
        self.steps = [
            self.compiled(partial(self._step, index), step) for index in range(self.head.depth)
        ]

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        self.follow_weights()
        return SequentialSession(self, rows=len(lengths))


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
        drafter, is_prompt = self.drafter, cache.is_empty
        # Prompts are seldom of one length, so a graph for each would be used once.
        read = drafter.read_eagerly if is_prompt else drafter.read
        states = read(hidden, cache.positions(count), mask, cache.view(count))
        cache.keep_pending(count)
        cache.commit_first(lengths, committed.counts)
        return at_last(states, lengths)

    @torch.no_grad()
    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> TokenTree:
        self.catch_up()
        assert self.state is not None and self.roots is not None
        drafter, states = self.drafter, self.state[:, None]

        def guess(depth: int, level: Level, tokens: torch.Tensor) -> Guesses:
            nonlocal states
            states, logits, ids = drafter.steps[depth](states[:, level.above], tokens)
            return logits, ids

        shape = drafter.shape(budget, random)
        levels, scores = drafter.levels(shape), drafter.scores(shape)
        return filled_tree(shape, levels, self.roots, guess, sampling, random, scores)
