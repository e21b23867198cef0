"""Drafting with a recurrent head: its cache, and the trees that it grows or fills."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from drafthead.heads.cache import CacheColumns
from drafthead.heads.cache_memory import CacheMemory
from drafthead.heads.coupling import Choice, NextDraws
from drafthead.heads.drafting.drafter import Committed, DraftSession, at_last
from drafthead.heads.drafting.late_reader import LateReader
from drafthead.heads.drafting.row_state import RowState
from drafthead.heads.families.head_drafter import HeadDrafter, register_drafter
from drafthead.heads.families.recurrent import RecurrentHead
from drafthead.heads.layers.cache import DraftCache
from drafthead.heads.sampling import RowRandom, SamplingConfig
from drafthead.heads.target.features import Features
from drafthead.heads.target.target import Target
from drafthead.heads.trees.dynamic import Children, dynamic_tree
from drafthead.heads.trees.levels import Guesses, Level, best_guesses, filled_tree
from drafthead.heads.trees.tree import Budget, TokenTree, TreeShape

# Children of a node, and nodes of a level that get children, in a dynamic tree (EAGLE-2's k).
DYNAMIC_WIDTH = 10

# Sizes of dynamic trees that differ enough to choose between, and the most nodes for each level.
DYNAMIC_SIZES = (2, 4, 8, 16, 32, 64)
NODES_A_LEVEL = 13

# Dimensions of what the passes over a cache read and write.
CACHED = {"mask": "B . T S", "columns": "T", "keys": "B . C .", "values": "B . C ."}
READING = {
    "last": "B T .",
    "taps": "B T .",
    "tokens": "B T",
    "lengths": "B",
    "positions": "B T",
    **CACHED,
}
DRAFTING = {"above": "B T .", "tokens": "B T", "positions": "B T", **CACHED}


class Guess(NamedTuple):
    """What the head outputs at n nodes, and its guesses of their children."""

    outputs: torch.Tensor  # [B, n, D]
    logits: torch.Tensor  # [B, n, k] of the best guesses
    ids: torch.Tensor  # [B, n, k] their tokens
    total: torch.Tensor  # [B, n, 1] log of the sum of exp over all logits

    def best(
        self, count: int, depth: int, draws: NextDraws | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and tokens [B, n, count] of the best guesses at nodes of a depth."""
        if draws is None:
            return self.logits[..., :count] - self.total, self.ids[..., :count]
        log_probs, places = draws.best(depth, self.logits, self.ids, count)
        return log_probs, self.ids.gather(-1, places)


@register_drafter(RecurrentHead)
class RecurrentDrafter(HeadDrafter[RecurrentHead]):
    """A recurrent head on dynamic trees, and on static ones where children are drawn.

    The static trees are the fixed one, or those grown from measured paths.
    """

    def __init__(self, head: RecurrentHead, target: Target, shape: TreeShape | None):
        """Raises UserError when the tree is deeper than the head drafts."""
        super().__init__(head, target, shape, dynamic_budgets(head.depth))
        self.known_visible: dict[TreeShape, list[torch.Tensor]] = {}
        self.read: Callable[..., Guess] = self.read_eagerly
        self.draft: Callable[..., Guess] = self._draft

    def read_eagerly(
        self,
        last: torch.Tensor | None,  # [B, T, D]
        taps: tuple[torch.Tensor, ...],  # [B, T, D] each
        tokens: torch.Tensor,  # [B, T]
        lengths: torch.Tensor,  # [B]
        positions: torch.Tensor,  # [B or 1, T]
        mask: torch.Tensor,  # [B or 1, 1, T, S]
        columns: torch.Tensor,  # [T]
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> Guess:
        """Read committed positions; the guesses [B, 1, k] after the last one of each row."""
        states = self.head.encode(Features(last, taps))
        cached = CacheColumns(keys, values, columns, mask.shape[-1])
        embeds = self.head.embed(tokens, self.target)
        outputs = self._pass(embeds, states, positions, mask, cached)
        return self._guess(at_last(outputs, lengths)[:, None])

    def _draft(
        self,
        above: torch.Tensor,  # [B, n, D] outputs at their parents
        tokens: torch.Tensor,  # [B, n]
        positions: torch.Tensor,  # [B, n]
        mask: torch.Tensor,  # [B or 1, 1, n, S]
        columns: torch.Tensor,  # [n]
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> Guess:
        """The guesses after drafted nodes."""
        embeds, states = self.head.draft_inputs(tokens, above, self.target)
        cached = CacheColumns(keys, values, columns, mask.shape[-1])
        return self._guess(self._pass(embeds, states, positions, mask, cached))

    def _pass(
        self,
        embeds: torch.Tensor,  # [B, T, D]
        states: torch.Tensor,  # [B, T, D]
        positions: torch.Tensor,  # [B or 1, T]
        mask: torch.Tensor,  # [B or 1, 1, T, S]
        cached: CacheColumns,
    ) -> torch.Tensor:
        """Outputs [B, T, D]."""
        rotation = self.head.rotary(positions)
        return self.head.run_layers(embeds, states, rotation, mask, cached.append)

    def _guess(self, outputs: torch.Tensor) -> Guess:
        """The guesses from outputs [B, n, D]."""
        logits = self.head.logits(outputs, self.target).float()
        total = logits.logsumexp(-1, keepdim=True)
        return Guess(outputs, *best_guesses(logits, self.head.draft_ids), total)

    def compile(self) -> None:
        """Compile the passes over committed positions and over drafted nodes."""
        self.memory = CacheMemory.where_recorded(self.target.device)
        self.read = self.compiled(self.read_eagerly, READING)
        self.draft = self.compiled(self._draft, DRAFTING)

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session for prompts [B, T]; their features come with the first commit."""
        return RecurrentSession(self, rows=len(lengths))

    def visible(self, shape: TreeShape) -> list[torch.Tensor]:
        """`visible_nodes` of a static tree, [1, n, m + n] for each level; made once for a shape."""
        if shape not in self.known_visible:
            self.known_visible[shape] = visible_nodes(shape, self.levels(shape))
        return self.known_visible[shape]


def dynamic_budgets(depth: int) -> tuple[Budget, ...]:
    """Budgets of a drafter that needs a pass for each level, so that depth is worth choosing."""
    return tuple(
        Budget(nodes, levels)
        for nodes in DYNAMIC_SIZES
        for levels in range(1, depth + 1)
        if levels < nodes <= NODES_A_LEVEL * levels
    )


def visible_nodes(shape: TreeShape, levels: list[Level]) -> list[torch.Tensor]:
    """For each level [1, n, m + n]: which of the m inner nodes before and its own n each of n sees.

    The root is committed, so it is not among them. In a tree with the paths (0,) (1,) (1, 0) and a
    child of each leaf, the inner nodes are 1 and 2, then 3: 1 sees 1, 2 sees 2, 3 sees 2 and 3.
    """
    visible, drafted = [], levels[0].nodes[:0]
    for depth, level in enumerate(levels):
        if depth > 0:
            drafted = torch.cat([drafted, level.nodes])
        visible.append(shape.ancestors.to(drafted.device)[level.nodes][:, drafted][None])
    return visible


class DraftReader(RowState):
    """A recurrent head with its cache: committed positions stay in it, drafted ones are pending."""

    row_state = ("cache",)

    def __init__(self, drafter: RecurrentDrafter, rows: int):
        self.drafter = drafter
        self.cache = DraftCache(drafter.head.layers, rows, drafter.memory)

    def read(self, committed: Committed) -> Guess:
        """Read committed positions; the guesses [B, 1, k] after the last one of each row."""
        tokens, cache, drafter = committed.tokens, self.cache, self.drafter
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        mask = cache.mask((steps[:, None] >= steps)[None])
        # Prompts are seldom of one length, so a graph for each would be used once.
        read = drafter.read_eagerly if cache.is_empty else drafter.read
        guess = read(
            committed.features.last,
            committed.features.taps,
            tokens,
            committed.lengths,
            cache.positions(tokens.shape[1]),
            mask,
            cache.make_room(tokens.shape[1])[1],
            cache.keys,
            cache.values,
        )
        cache.keep_pending(tokens.shape[1])
        cache.commit_first(committed.lengths, committed.counts)
        return Guess(*guess)

    def draft(
        self,
        parents: Guess,  # of the level above
        above: torch.Tensor,  # [B, n] places of each node's parent in it
        tokens: torch.Tensor,  # [B, n]
        depth: int,
        visible: torch.Tensor,  # [B or 1, n, pending + n] bool
    ) -> Guess:
        """The guesses [B, n, k] after drafted nodes of one depth, which stay pending.

        `visible` marks the drafted nodes, these included, that each node is or descends from.
        """
        assert self.cache.lengths is not None
        rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        positions = (self.cache.lengths[:, None] + depth - 1).expand_as(tokens)
        return self._guess_at(parents.outputs[rows, above], tokens, positions, visible)

    def draft_blindly(self, roots: torch.Tensor, root_guess: Guess, depth: int) -> Guess:
        """The guesses [B, depth - 1, k] at depths 1 to depth - 1, for any tokens there.

        Of the roots [B] and the guesses at them only the shapes are used; see `drafts_blindly`.
        """
        assert self.cache.lengths is not None
        steps = torch.arange(depth - 1, device=roots.device)
        tokens = roots[:, None].expand(-1, depth - 1)
        positions = self.cache.lengths[:, None] + steps
        above = root_guess.outputs.expand(-1, depth - 1, -1)
        return self._guess_at(above, tokens, positions, (steps[:, None] >= steps)[None])

    def _guess_at(
        self,
        above: torch.Tensor,  # [B, n, D] outputs at the parents
        tokens: torch.Tensor,  # [B, n]
        positions: torch.Tensor,  # [B, n]
        visible: torch.Tensor,  # [B or 1, n, pending + n] bool
    ) -> Guess:
        """The guesses [B, n, k] after drafted nodes, which stay pending."""
        cache = self.cache
        mask, (_, columns) = cache.mask(visible), cache.make_room(tokens.shape[1])
        guess = self.drafter.draft(
            above, tokens, positions, mask, columns, cache.keys, cache.values
        )
        cache.keep_pending(tokens.shape[1])
        return Guess(*guess)


class RecurrentSession(LateReader):
    """A recurrent head at work on one batch."""

    row_state = (*LateReader.row_state, "reader", "root_guess")

    def __init__(self, drafter: RecurrentDrafter, rows: int):
        super().__init__(drafter.memory)
        self.drafter = drafter
        self.reader = DraftReader(drafter, rows)
        self.root_guess: Guess | None = None  # n = 1
        self.depth_guesses: Guess | None = None  # n = depth - 1, of a head that drafts blindly

    @torch.no_grad()
    def read(self, committed: Committed) -> None:
        """Read it, and keep the guesses after the roots."""
        self.root_guess = self.reader.read(committed)

    @torch.no_grad()
    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """Read what is new, then draft level by level."""
        self.catch_up()
        drafter = self.drafter
        if not isinstance(random, RowRandom) and drafter.fixed is None:
            self._look_ahead(budget.depth)
            tree = self._grown(budget, random)
        else:
            shape = drafter.shape(budget, random)
            self._look_ahead(shape.depth)
            tree = self._filled(shape, sampling, random)
        self.reader.cache.discard()
        return tree

    def _look_ahead(self, depth: int) -> None:
        """Draft all depths of a tree at once, if the head can."""
        if self.drafter.head.drafts_blindly and depth > 1:
            assert self.roots is not None and self.root_guess is not None
            self.depth_guesses = self.reader.draft_blindly(self.roots, self.root_guess, depth)

    def _guess_at(
        self,
        parents: Guess,  # of the level above
        above: torch.Tensor,  # [B, n] places of each node's parent in it
        tokens: torch.Tensor,  # [B, n]
        depth: int,
        visible: torch.Tensor,  # [B or 1, n, pending + n] bool
    ) -> Guess:
        """The guesses [B, n, k] after drafted nodes of one depth; see `DraftReader.draft`."""
        if self.depth_guesses is None:
            return self.reader.draft(parents, above, tokens, depth, visible)
        at_depth = (part[:, depth - 1, None] for part in self.depth_guesses)
        return Guess(*(part.expand(-1, tokens.shape[1], -1) for part in at_depth))

    def _grown(self, budget: Budget, draws: NextDraws | None) -> TokenTree:
        """A dynamic tree: it grows where the head is most certain, with `draws` of these."""
        assert self.roots is not None and self.root_guess is not None
        latest = self.root_guess
        width = min(DYNAMIC_WIDTH, budget.nodes - 1, latest.ids.shape[-1])

        def expand(
            tokens: torch.Tensor, above: torch.Tensor, visible: torch.Tensor, depth: int
        ) -> Children:
            nonlocal latest
            latest = self._guess_at(latest, above, tokens, depth, visible)
            return latest.best(width, depth, draws)

        return dynamic_tree(self.roots, budget, latest.best(width, 0, draws), expand)

    def _filled(self, shape: TreeShape, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """A tree of a given shape: the best guesses, or guesses drawn without replacement."""
        assert self.roots is not None and self.root_guess is not None
        latest, visible = self.root_guess, self.drafter.visible(shape)

        def guess(depth: int, level: Level, tokens: torch.Tensor) -> Guesses:
            nonlocal latest
            if depth > 0:
                above = level.above.expand_as(tokens)
                latest = self._guess_at(latest, above, tokens, depth, visible[depth])
            return latest.logits, latest.ids

        levels, scores = self.drafter.levels(shape), self.drafter.scores(shape)
        return filled_tree(shape, levels, self.roots, guess, sampling, random, scores)
