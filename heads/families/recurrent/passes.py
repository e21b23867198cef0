"""The passes of a recurrent head: over committed positions, drafted nodes, levels of a tree.

Each is a function of tensors alone, called once or once a level, so that it can be compiled.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from drafthead.core.coupling import DRAWS, NextDraws
from drafthead.core.dims import Spec
from drafthead.core.drafting.drafter import at_last
from drafthead.core.kv_cache.column_cache import (
    CacheView,
    Room,
    dims_of_room,
    dims_of_view,
    move_columns,
)
from drafthead.core.sampling import DRAFT_SUPPORT
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TreeShape, TreeTables
from drafthead.heads.families.head_drafter import HeadDrafter
from drafthead.heads.families.recurrent.head import RecurrentHead
from drafthead.heads.growing.dynamic import (
    Candidates,
    num_opened,
    open_level,
    with_children,
)
from drafthead.heads.growing.levels import Level

# Children of a node, and nodes of a level that get children, in a dynamic tree (EAGLE-2's k).
DYNAMIC_WIDTH = 10

# Sizes of dynamic trees that differ enough to choose between, and the most nodes for each level.
DYNAMIC_SIZES = (2, 4, 8, 16, 32, 64)
# On a GPU a pass over 64 nodes takes little longer than one over 16, and each size is recorded for
# each depth.
SIZES_ON_GPU = (4, 16, 64)
NODES_A_LEVEL = 13

# Dimensions of what the compiled passes read and write: T new positions, n drafted nodes, E
# candidates, F nodes that were opened before, P drafted nodes that they may see.
READING: dict[str, Spec] = {
    "last": "B T .",
    "taps": "B T .",
    "tokens": "B T",
    "counts": "B",
    "view": dims_of_view("T"),
}
DRAFTING: dict[str, Spec] = {
    "above": "B T .",
    "tokens": "B T",
    "positions": "B T",
    "mask": "B . T S",
    "view": dims_of_view("T"),
}
GUESS = ("B . .", "B . .", "B . .", "B . .")
CANDIDATES = ("B E", "B E", "B E", "B F")
STARTING: dict[str, Spec] = {"guess": GUESS, "roots": "B", "draws": DRAWS}
GROWING: dict[str, Spec] = {
    "candidates": CANDIDATES,
    "outputs": "B F .",
    "visible": "B F P",
    "places": "B",
    "slots": "T",
    "view": dims_of_view("T"),
    "draws": DRAWS,
}
FINISHING: dict[str, Spec] = {"candidates": CANDIDATES, "slots": "N"}
ALL_LEVELS: dict[str, Spec] = {
    "guess": GUESS,
    "roots": "B",
    "view": dims_of_view("T"),
    "draws": DRAWS,
}
READ_AND_ALL_LEVELS: dict[str, Spec] = {
    **READING,
    "room": dims_of_room("P", "Q"),
    "draws": DRAWS,
}


class Guess(NamedTuple):
    """The head's outputs at n nodes, and its guesses of their children."""

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

    def at_all(self, count: int) -> "Guess":
        """The guess of one node, n = 1, as the guess at each of `count` nodes."""
        return Guess(*(part.expand(-1, count, -1) for part in self))


class Grown(NamedTuple):
    """A dynamic tree that grows, and the nodes that were opened last."""

    scores: torch.Tensor  # this and the following three: its `Candidates`
    tokens: torch.Tensor
    parents: torch.Tensor
    opened: torch.Tensor
    outputs: torch.Tensor  # [B, F, D] of the head at the opened nodes
    visible: torch.Tensor | None  # [B, F, P] which drafted nodes they see; None at the roots
    places: torch.Tensor  # [B] positions of the nodes one level down

    @property
    def candidates(self) -> Candidates:
        """The candidates so far."""
        return Candidates(*self[:4])


class RecurrentPasses(HeadDrafter[RecurrentHead]):
    """A recurrent head with its passes, which sessions call."""

    with_kernels = (*HeadDrafter.with_kernels, "open_level", "with_children")

    def __init__(self, head: RecurrentHead, target: Target, shape: TreeShape | None):
        """Raises UserError when the tree is deeper than the head drafts."""
        sizes = SIZES_ON_GPU if target.device.type == "cuda" else DYNAMIC_SIZES
        super().__init__(head, target, shape, dynamic_budgets(head.depth, sizes))
        self.open_level, self.with_children = open_level, with_children
        self.embedding: nn.Module | None = None  # of the tokens that kernels read
        self.known_visible: dict[TreeShape, list[torch.Tensor]] = {}
        self.read: Callable[..., Guess] = self.read_eagerly
        self.read_prompt = self.read
        self.draft: Callable[..., Guess] = self._draft
        self.start_growth: Callable[..., Candidates] = self._start_growth
        self.grow: Callable[..., Grown] = self._grow
        self.finish: Callable[..., TreeTables] = self._finish
        self.reading = self.read  # within recordings
        self.grow_all: Callable[..., TreeTables] = self._grow_all
        self.read_and_grow_all: Callable[..., tuple[Guess, TreeTables]] = self._read_and_grow_all

    @property
    def width(self) -> int:
        """Children of a node in a dynamic tree."""
        return min(DYNAMIC_WIDTH, self.num_guesses)

    def read_eagerly(
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
            mask = view.mask((steps[:, None] >= steps)[None], self.visible_columns)
        states = self.head.encode(Features(last, taps))
        positions = view.lengths[:, None] + steps
        return self._guess(tokens, states, False, positions, mask, view, ends=counts)

    def _draft(
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
        best, places, total = self.largest(logits, count)
        return Guess(outputs, best, head.tokens_of(places), total)

    def _start_growth(
        self,
        guess: Guess,  # n = 1, at the roots
        roots: torch.Tensor,  # [B]
        draws: NextDraws | None,  # of the children of the roots
    ) -> Candidates:
        """The first candidates of a dynamic tree."""
        number = torch.zeros_like(roots[:, None])
        alone = Candidates(number.float(), roots[:, None], number - 1, number)
        return self.with_children(alone, number, *guess.best(self.width, 0, draws))

    def _grow(
        self,
        candidates: Candidates,
        outputs: torch.Tensor,  # [B, F, D], and so on: see `Grown`
        visible: torch.Tensor | None,  # [B, F, P]
        places: torch.Tensor,  # [B]
        slots: torch.Tensor,  # [n], the numbers from 0, of the nodes to open
        view: CacheView,  # n columns
        draws: NextDraws | None,  # of the children of the opened nodes
    ) -> Grown:
        """One level of a dynamic tree: the best nodes of the level are drafted and get children.

        One call, as the pass of the target has just flushed the CPU caches, which each call pays
        for.
        """
        opened, tokens, parents, inside = self.open_level(
            candidates, outputs, visible, slots, self.width
        )
        mask = view.mask(inside, self.visible_columns)
        positions = places[:, None].expand_as(tokens)
        # Where nothing is drawn, no others than the children are looked at.
        count = self.width if draws is None else DRAFT_SUPPORT
        guess = self._draft(parents, tokens, positions, mask, view, count)
        grown = self.with_children(candidates, opened, *guess.best(self.width, 0, draws))
        return Grown(*grown, guess.outputs, inside, places + 1)

    def _finish(self, candidates: Candidates, slots: torch.Tensor) -> TreeTables:
        """The trees of N nodes, for `slots` [N], the numbers from 0."""
        return self.best_tree(candidates, slots, self.head.depth)

    def opened(self, budget: Budget) -> list[int]:
        """How many nodes get children at depth 1, 2, ... of a dynamic tree within a budget."""
        counts: list[int] = []
        available = self.width
        for depth in range(1, budget.depth):
            count = num_opened(budget.nodes, depth, self.width, available)
            # A level of one node would be a graph of its own.
            counts.append(max(count, min(2, available)))
            available = counts[-1] * self.width
        return counts

    def _grow_all(
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
        at: Callable[[int], NextDraws | None]
        at = (lambda depth: None) if draws is None else draws.at
        first = self.start_growth(guess, roots, at(0))
        grown = Grown(*first, guess.outputs, None, view.lengths)
        # Made here: what a recording makes belongs to it.
        slots = torch.arange(max(budget.nodes, len(view.room.columns)), device=roots.device)
        written = 0
        for depth, count in enumerate(self.opened(budget), start=1):
            above = grown.candidates, grown.outputs, grown.visible, grown.places
            own = view._replace(room=view.room.part(written, count))
            grown = self.grow(*above, slots[:count], own, at(depth))
            written += count
        return self.finish(grown.candidates, slots[: min(budget.nodes, grown.scores.shape[1])])

    def _read_and_grow_all(
        self,
        last: torch.Tensor | None,  # [B, T, D], and so on: see `read_eagerly`
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
        guess = self.reading(last, taps, tokens, counts, view)
        if len(tokens) > 1:
            places = view.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
            move_columns(view.keys, view.values, view.room.columns.expand_as(tokens), places)
        after = view._replace(lengths=view.lengths + counts, room=room)
        return guess, self._grow_all(guess, at_last(tokens, counts), after, draws, budget)

    def prepare(self, target: Target | None) -> None:
        """Draft compiled from now on; layers with a window read masks, which can be cut."""
        super().prepare(target)
        if self.head.config.window:
            self.kernels = None

    def compile(self, target: Target | None = None) -> None:
        self.prepare(target)
        self.read, self.read_prompt = self.compiled_readers(self.read_eagerly, READING)
        self.draft = self.compiled(self._draft, DRAFTING)
        if not self.backend.compiles:
            self.grow_all = self.compiled(self._grow_all, ALL_LEVELS)
            return
        if not self.memory.is_recorded:
            self.start_growth = self.compiled(self._start_growth, STARTING)
            self.grow = self.compiled(self._grow, GROWING)
            self.finish = self.compiled(self._finish, FINISHING)
            return
        fused = self.backend.fused
        self.grow, self.reading = fused(self._grow), fused(self.read_eagerly)
        self.start_growth, self.finish = fused(self._start_growth), fused(self._finish)
        self.grow_all = self.compiled(self._grow_all, ALL_LEVELS)
        self.read_and_grow_all = self.compiled(self._read_and_grow_all, READ_AND_ALL_LEVELS)

    def visible(self, shape: TreeShape) -> list[torch.Tensor]:
        """`visible_nodes` of a static tree, [1, n, m + n] for each level; made once for a shape."""
        if shape not in self.known_visible:
            self.known_visible[shape] = visible_nodes(shape, self.levels(shape))
        return self.known_visible[shape]


def dynamic_budgets(depth: int, sizes: Sequence[int]) -> tuple[Budget, ...]:
    """Budgets of a drafter that needs a pass for each level, so that depth is worth choosing."""
    return tuple(
        Budget(nodes, levels)
        for nodes in sizes
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
