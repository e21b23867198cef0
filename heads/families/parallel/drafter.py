"""Drafting with a block-parallel head: its context, its pass, and the trees of its candidates."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.drafting.drafter import Committed, DraftSession, OnDevice, at_last
from drafthead.core.kv_cache.column_cache import (
    CacheColumns,
    CacheView,
    Room,
)
from drafthead.core.sampling import RowRandom, Sampling
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape, TreeTables
from drafthead.heads.families.head_drafter import HeadDrafter, register_head_drafter
from drafthead.heads.families.late_reader import LateReader
from drafthead.heads.families.parallel.candidates import (
    CANDIDATES,
    DraftedBlock,
    Scorer,
    best_first_growth,
    extended,
    num_candidates,
)
from drafthead.heads.families.parallel.head import ParallelHead
from drafthead.heads.growing.dynamic import Growth
from drafthead.heads.growing.levels import Guess, Nodes
from drafthead.heads.growing.static import tree_budgets
from drafthead.heads.layers.cache import DraftCache
from drafthead.heads.layers.decoder_layer import Store

# Frontiers of recorded growths, see `best_first_growth`: for trees of up to 16 and 64 nodes. Each
# is a recording, and a wider one than a tree needs costs little.
FRONTIERS = (14, 62)

Tensors = tuple[torch.Tensor, ...]


class BlockDraft(NamedTuple):
    """The tables of a tree, and what the session keeps."""

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    scores: torch.Tensor
    before: torch.Tensor  # [B, D] fused features before the roots
    lengths: torch.Tensor  # [B] positions that have been read

    @property
    def tables(self) -> TreeTables:
        """Tables of the drafted tree, without what was read for it."""
        return TreeTables(*self[:5])


class Reach(NamedTuple):
    """The reach of trees as they grow, see `best_first_growth`."""

    levels: int
    frontier: int


@register_head_drafter(ParallelHead)
class ParallelDrafter(HeadDrafter[ParallelHead]):
    """A block-parallel head on its most probable trees, or on static ones."""

    def __init__(self, head: ParallelHead, target: Target, shape: TreeShape | None):
        """Raises UserError when the tree is deeper than the block."""
        super().__init__(head, target, shape, tree_budgets(head.depth))

    @cached_property
    def inside(self) -> torch.Tensor:
        """Return which slots of a block see which, [1, block_size, block_size]."""
        return self.head.transformer.visible(1, self.target.device)[None]

    def read(
        self,
        taps: Tensors,  # [B, T, D] each
        positions: torch.Tensor,  # [B or 1, T]
        view: CacheView,  # T columns
    ) -> torch.Tensor:
        """Fused features [B, T, D] of committed positions, whose keys and values are written."""
        transformer = self.head.transformer
        fused = transformer.fused(taps)
        cached = CacheColumns(view.keys, view.values, view.room.columns, end=0)  # only written
        for layer, states in enumerate(transformer.context(fused, positions)):
            cached.append(layer, *states)
        return fused

    def block(
        self,
        roots: torch.Tensor,  # [B]
        before: torch.Tensor,  # [B, D], fused features before the roots
        positions: torch.Tensor,  # [B, 1] of the roots
        mask: torch.Tensor,  # [B or 1, 1, block_size, S]
        view: CacheView,  # block_size columns
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [B, K, D] of the block after the roots, and its logits [B, K, Vd]."""
        transformer = self.head.transformer
        cached = view.opened()
        stores: list[Store] = [cached.of_layer(n) for n in range(len(transformer.layers))]
        block = roots[:, None], before[:, None]  # one block a row
        hidden = transformer(self.target, *block, positions, mask, stores)[:, 0]
        return hidden, self.head.base_logits(hidden, self.target).float()

    def draft(
        self,
        taps: Tensors,  # [B, T, D] each, of positions that were not read yet
        counts: torch.Tensor,  # [B] how many of them each row has, at least 1
        view: CacheView,  # T columns after what was read before
        roots: torch.Tensor,  # [B]
        inside: torch.Tensor,  # [1, block_size, block_size], see `inside`
        room: Room,  # block_size columns after them
        slots: torch.Tensor,  # [N], the numbers of the tree's nodes
        draws: NextDraws | None,
        growing: Reach,
    ) -> BlockDraft:
        """A whole draft: reads what was committed, passes over the block and grows the tree.

        One call, as the pass of the target has just flushed the CPU caches, which each call pays
        for.
        """
        steps = torch.arange(view.room.columns.shape[0], device=roots.device)
        positions = view.lengths[:, None] + steps
        fused = self.part(self.read)(taps, positions, view)
        if roots.shape[0] > 1:  # the columns of a single row are the right ones
            columns = view.room.columns.expand_as(positions)
            self.operations.move_columns(view.keys, view.values, columns, positions)
        before, lengths = at_last(fused, counts), view.lengths + counts
        after = view._replace(lengths=lengths, room=room)
        mask = self.head.transformer.in_window(
            after.mask(inside, self.operations.visible_columns)[:, 0], lengths[:, None]
        )
        passed = roots, before, lengths[:, None], mask[:, None], after
        hidden, logits = self.part(self.block)(*passed)
        tree = self.grown(roots, hidden, logits, slots, draws, growing)
        return BlockDraft(*tree, before, lengths)

    def grown(
        self,
        roots: torch.Tensor,  # [B]
        hidden: torch.Tensor,  # [B, K, D] of the block
        logits: torch.Tensor,  # [B, K, Vd]
        slots: torch.Tensor,  # [N]
        draws: NextDraws | None,
        growing: Reach,
    ) -> TreeTables:
        """The most probable tree; with `draws`, of the target's own draws."""
        slots_of_block = [(hidden[:, d, None], logits[:, d, None]) for d in range(hidden.shape[1])]
        scorer = Scorer.of(
            DraftedBlock(self.head, hidden, logits),
            roots,
            draws,
            lambda depth, *rest: self.part(self.choose)(*slots_of_block[depth], *rest),
        )
        extend = self.part(self.extend)
        growth = best_first_growth(
            *(roots, scorer, *growing),
            lambda depth, *rest: extend(*scorer.at(depth), *rest),
            self.operations,
        )
        return self.operations.best_tree(growth, slots, growing.levels)

    def choose(self, hidden: torch.Tensor, logits: torch.Tensor, *rest: Any) -> Tensors:
        """`DraftedBlock.choose` of a slot alone, with hidden [B, 1, D] and logits [B, 1, Vd]."""
        return DraftedBlock(self.head, hidden, logits, self.operations.largest).choose(0, *rest)

    def extend(self, hidden: torch.Tensor, *rest: Any) -> Growth:
        """`extended` by what `Scorer.at` a depth gives, hidden [B, 1, D] first."""
        *here, growth, slots = rest
        scorer = Scorer(DraftedBlock(self.head, hidden), *here)
        return extended(scorer, 0, growth, slots, self.operations)

    def growing(self, budget: Budget) -> Reach:
        """Return how far trees of a budget grow; recorded, few answers serve all budgets."""
        levels = min(budget.depth, self.head.depth, budget.nodes - 1)
        frontier = max(1, budget.nodes - 2)
        if not self.backend.records:
            return Reach(levels, frontier)
        if levels == budget.nodes - 1:  # deeper nodes are candidates that find no room
            levels = self.head.depth
        return Reach(levels, next((f for f in FRONTIERS if f >= frontier), frontier))

    def session(self, rows: int) -> DraftSession:
        return ParallelSession(self, rows)


class ParallelSession(LateReader, OnDevice):
    """A block-parallel head at work: the state is the context's keys and values."""

    row_state = (*LateReader.row_state, "cache", "before")

    def __init__(self, drafter: ParallelDrafter, rows: int):
        super().__init__(drafter.memory)
        self.drafter = drafter
        self.cache = DraftCache(drafter.head.transformer.layers, rows, drafter.memory)
        self.before: torch.Tensor | None = None  # [B, D], fused features before the roots

    @torch.no_grad()
    def read(self, committed: Committed) -> None:
        tokens, lengths, cache = committed.tokens, committed.lengths, self.cache
        is_prompt = self.drafter.is_prompt(cache, tokens.shape[1])
        read = self.drafter.reading(self.drafter.read, is_prompt)
        positions, view = cache.positions(tokens.shape[1]), cache.view(tokens.shape[1])
        fused = read(committed.features.taps, positions, view)
        cache.keep_pending(tokens.shape[1])
        cache.commit_first(lengths, committed.counts)
        self.before = at_last(fused, lengths)

    @torch.no_grad()
    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> TokenTree:
        self.cache.settle()
        if isinstance(random, RowRandom) or self.drafter.fixed is not None:
            return self._filled(budget, sampling, random)
        return self._grown(budget, random)

    def _grown(self, budget: Budget, draws: NextDraws | None) -> TokenTree:
        """The most probable tree after the roots; with `draws`, of the target's own draws."""
        drafter, unread = self.drafter, self.read_to_last_part()
        depth, width = drafter.head.depth, min(CANDIDATES, drafter.head.num_guesses)
        growing = drafter.growing(budget)
        nodes = min(budget.nodes, num_candidates(width, *growing))
        how = drafter.slots(nodes), None if draws is None else draws.padded(depth), growing
        tables = self._after_prompt(*how) if unread is None else self._after(unread, *how)
        return tables.tree(growing.levels, width)

    def _after_prompt(
        self, slots: torch.Tensor, draws: NextDraws | None, growing: Reach
    ) -> TreeTables:
        """A tree of N nodes, for `slots` [N], where all has been read; seldom, so not recorded."""
        assert self.roots is not None
        hidden, logits = self._passed(self.drafter.block)
        return self.drafter.grown(self.roots, hidden, logits, slots, draws, growing)

    def _after(
        self,
        unread: Committed,
        slots: torch.Tensor,  # [N]
        draws: NextDraws | None,
        growing: Reach,
    ) -> TreeTables:
        """A tree of N nodes, for `slots` [N], in one call that reads unread positions first."""
        drafter, cache = self.drafter, self.cache
        if drafter.backend.records:
            unread = unread.padded(2)  # one position would be a recording of its own
        view, room = cache.view_and_room(unread, drafter.head.config.block_size)
        assert self.roots is not None
        given = unread.features.taps, unread.lengths, view, self.roots, drafter.inside, room
        drafted = drafter.whole(drafter.draft)(*given, slots, draws, growing)
        cache.advance(drafted.lengths, unread.bounds, late=unread.late)
        self.before = drafted.before
        return drafted.tables

    def _filled(self, budget: Budget, sampling: Sampling, random: Choice) -> TokenTree:
        """A tree of a given shape: the best guesses, or guesses drawn without replacement."""
        drafter = self.drafter
        hidden, logits = self._passed(drafter.whole(drafter.block))
        assert self.roots is not None

        def expand(nodes: Nodes) -> Guess:
            """After each real path."""
            slot = hidden[:, nodes.depth, None], logits[:, nodes.depth, None]
            block = DraftedBlock(drafter.head, *slot)
            codes, states = block.codes(0, nodes.tokens, nodes.states)
            return drafter.guess(states, block.logits_after(0, codes))

        states = DraftedBlock(drafter.head, hidden).begin()
        return drafter.filled(budget, self.roots, states, expand, sampling, random)

    def block_states(self) -> torch.Tensor:
        """Hidden states [B, K, D] of the block after the roots."""
        return self._passed(self.drafter.block)[0]

    def _passed(self, block: Callable[..., Tensors]) -> Tensors:
        """The outputs of a pass over the block, whose keys and values are not kept."""
        self.catch_up()
        cache, transformer = self.cache, self.drafter.head.transformer
        assert self.roots is not None and cache.lengths is not None
        positions = cache.lengths[:, None]
        mask = transformer.in_window(cache.mask(self.drafter.inside)[:, 0], positions)[:, None]
        view = cache.view(transformer.config.block_size)
        return block(self.roots, self.before, positions, mask, view)
