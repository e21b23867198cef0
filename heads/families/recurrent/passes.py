"""The passes of a recurrent head: over committed positions, drafted nodes, levels of a tree.

Each is a function of tensors alone, called once or once a level, so that it can be recorded.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from drafthead.core.coupling import NextDraws
from drafthead.core.drafting.drafter import at_last
from drafthead.core.kv_cache.column_cache import CacheView, Room
from drafthead.core.sampling import DRAFT_SUPPORT
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TreeShape, TreeTables
from drafthead.heads.families.head_drafter import HeadDrafter
from drafthead.heads.families.recurrent.head import RecurrentHead
from drafthead.heads.growing.dynamic import (
    Growth,
    Opened,
    first_level,
    next_level,
    num_opened,
)
from drafthead.heads.growing.levels import Guess

# Children of a node, and nodes of a level that get children, in a dynamic tree (EAGLE-2's k).
DYNAMIC_WIDTH = 10

# Sizes of dynamic trees that differ enough to choose between, and the most nodes for each level.
DYNAMIC_SIZES = (2, 4, 8, 16, 32, 64)
# On a GPU a pass over 64 nodes takes little longer than one over 16, and each size is recorded for
# each depth.
SIZES_ON_GPU = (4, 16, 64)
NODES_A_LEVEL = 13


class RecurrentPasses(HeadDrafter[RecurrentHead]):
    """A recurrent head with its passes, which sessions call."""

    def __init__(self, head: RecurrentHead, target: Target, shape: TreeShape | None):
        """Raises UserError when the tree is deeper than the head drafts."""
        sizes = SIZES_ON_GPU if target.device.type == "cuda" else DYNAMIC_SIZES
        super().__init__(head, target, shape, dynamic_budgets(head.depth, sizes))
        self.embedding: nn.Module | None = None  # of the tokens that kernels read

    @property
    def width(self) -> int:
        """Children of a node in a dynamic tree."""
        return min(DYNAMIC_WIDTH, self.num_guesses)

    def read(
        self,
        last: torch.Tensor | None,  # [B, T, D]
        taps: tuple[torch.Tensor, ...],  # [B, T, D] each
        tokens: torch.Tensor,  # [B, T]
        counts: torch.Tensor,  # [B] how many of them each row has
        view: CacheView,  # T columns after what was read before
        are_last: bool = False,
    ) -> Guess:
        """Read committed positions; the guesses [B, 1, k] after the last one of each row.

        Where they `are_last` of all columns in every row, they need no mask.
        """
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        mask: torch.Tensor
        if are_last:
            mask = causal_lower_right(len(steps), len(view.room.seen))
        else:
            mask = view.mask((steps[:, None] >= steps)[None], self.operations.visible_columns)
        states = self.head.encode(Features(last, taps))
        positions = view.lengths[:, None] + steps
        return self._guess(tokens, states, False, positions, mask, view, ends=counts)

    def draft(
        self,
        above: torch.Tensor,  # [B, n, D] outputs at their parents
        tokens: torch.Tensor,  # [B, n]
        positions: torch.Tensor,  # [B, n]
        mask: torch.Tensor,  # [B or 1, 1, n, S], or what the kernel takes in its place
        view: CacheView,  # n columns
        count: int = DRAFT_SUPPORT,
    ) -> Guess:
        """The `count` best guesses after drafted nodes."""
        return self._guess(tokens, above, True, positions, mask, view, count)

    def _guess(
        self,
        tokens: torch.Tensor,  # [B, T]
        states: torch.Tensor,  # [B, T, D]
        is_drafted: bool,
        positions: torch.Tensor,  # [B or 1, T]
        mask: torch.Tensor,  # [B or 1, 1, T, S]
        view: CacheView,
        count: int = DRAFT_SUPPORT,
        ends: torch.Tensor | None = None,  # [B]
    ) -> Guess:
        """The `count` best guesses after tokens; with `ends` [B] after the last of so many alone.

        The states of drafted tokens are the outputs that predicted them.
        """
        head, target, table = self.head, self.target, self.embedding
        if head.in_one_call is not None and type(table) is nn.Embedding:  # no adapter or scale
            given = table.weight, tokens, states, is_drafted, positions, mask
            cached = view.keys, view.values, view.room.columns
            outputs, logits = head.in_one_call(*given, *cached, ends)
            logits = target.finish_logits(logits)
        else:
            read = head.draft_inputs(tokens, states, target) if is_drafted else None
            embeds, states = read or (head.embed(tokens, target), states)
            rotation, store_of = head.rotary(positions), view.opened().of_layer
            outputs = head.run_layers(embeds, states, rotation, mask, store_of)
            outputs = outputs if ends is None else at_last(outputs, ends)[:, None]
            logits = head.logits(outputs, target)
        return self.guess(outputs, logits, count)

    def first_level(
        self,
        guess: Guess,  # n = 1, at the roots
        roots: torch.Tensor,  # [B]
        draws: NextDraws | None,  # of the children of the roots
    ) -> Growth:
        """The first candidates of a dynamic tree after roots [B]."""
        return first_level(roots, guess, self.width, draws, self.operations)

    def next_level(
        self,
        growth: Growth,
        places: torch.Tensor,  # [B] positions of the opened nodes
        slots: torch.Tensor,  # [n], the numbers from 0, of the nodes to open
        view: CacheView,  # n columns
        draws: NextDraws | None,  # of the children of the opened nodes
    ) -> Growth:
        """One level of a dynamic tree: the best nodes of the level are drafted and get children.

        Where nothing is drawn, no others than the children are looked at.
        """
        count = self.width if draws is None else DRAFT_SUPPORT

        def expand(nodes: Opened) -> Guess:
            mask = view.mask(nodes.visible, self.operations.visible_columns)
            positions = places[:, None].expand_as(nodes.tokens)
            return self.draft(nodes.states, nodes.tokens, positions, mask, view, count)

        return next_level(growth, slots, self.width, expand, draws, self.operations)

    def best_tree(self, growth: Growth, slots: torch.Tensor) -> TreeTables:
        """The trees of N nodes, for `slots` [N], the numbers from 0."""
        return self.operations.best_tree(growth, slots, self.head.depth)

    def opened(self, budget: Budget) -> list[int]:
        """The numbers of nodes that get children at depth 1, 2, ... of a tree within a budget."""
        counts: list[int] = []
        available = self.width
        for depth in range(1, budget.depth):
            count = num_opened(budget.nodes, depth, self.width, available)
            # A level of one node would be code of its own.
            counts.append(max(count, min(2, available)))
            available = counts[-1] * self.width
        return counts

    def grow(
        self,
        guess: Guess,  # n = 1, at the roots
        roots: torch.Tensor,  # [B]
        view: CacheView,  # a column for each node that is opened
        draws: NextDraws | None,
        budget: Budget,
    ) -> TreeTables:
        """A whole dynamic tree, in calls of its parts, or recorded as one graph: on a GPU the calls
        cost more than their work.
        """
        first = None if draws is None else draws.at(0)
        growth = self.part(self.first_level)(guess, roots, first)
        # Made here: what a recording makes belongs to it.
        slots = torch.arange(max(budget.nodes, len(view.room.columns)), device=roots.device)
        written, places = 0, view.lengths
        for depth, count in enumerate(self.opened(budget), start=1):
            own = view._replace(room=view.room.part(written, count))
            at = None if draws is None else draws.at(depth)
            growth = self.part(self.next_level)(growth, places, slots[:count], own, at)
            written, places = written + count, places + 1
        nodes = min(budget.nodes, growth.scores.shape[1])
        return self.part(self.best_tree)(growth, slots[:nodes])

    def read_and_grow(
        self,
        last: torch.Tensor | None,  # [B, T, D], and so on: see `read`
        taps: tuple[torch.Tensor, ...],
        tokens: torch.Tensor,  # [B, T]
        counts: torch.Tensor,  # [B]
        view: CacheView,  # T columns after what was read before
        room: Room,  # P columns for all opened nodes
        draws: NextDraws | None,
        budget: Budget,
    ) -> tuple[Guess, TreeTables]:
        """Read committed positions, then draft after them: the guesses at the roots, and the tree.

        Each row's positions are moved next to those that it had.
        """
        guess = self.part(self.read)(last, taps, tokens, counts, view)
        if len(tokens) > 1:
            places = view.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
            columns = view.room.columns.expand_as(tokens)
            self.operations.move_columns(view.keys, view.values, columns, places)
        after = view._replace(lengths=view.lengths + counts, room=room)
        return guess, self.grow(guess, at_last(tokens, counts), after, draws, budget)

    def compile(self, target: Target) -> None:
        """Run by kernels as any head, but for layers with a window: these read masks."""
        super().compile(target)
        if self.head.config.window:
            self.kernels = None


def dynamic_budgets(depth: int, sizes: Sequence[int]) -> tuple[Budget, ...]:
    """Budgets of a drafter that needs a pass for each level, so that depth is worth choosing."""
    return tuple(
        Budget(nodes, levels)
        for nodes in sizes
        for levels in range(1, depth + 1)
        if levels < nodes <= NODES_A_LEVEL * levels
    )
