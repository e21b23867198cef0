"""Drafting with a recurrent head: its cache, and the trees that it grows or fills."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from drafthead.heads.base import Committed, Drafter, DraftSession
from drafthead.heads.draft_layers import DraftCache
from drafthead.heads.dynamic_tree import TreeGrowth
from drafthead.heads.sampling import (
    RowRandom,
    SamplingConfig,
    draw_without_replacement,
    probabilities,
)
from drafthead.heads.target import Target
from drafthead.heads.tree import TREE_SIZES, Budget, StaticTrees, TokenTree, TreeShape

if TYPE_CHECKING:
    from drafthead.heads.recurrent import RecurrentHead

# Children of a node, and nodes of a level that get children, in a dynamic tree (EAGLE-2's k).
DYNAMIC_WIDTH = 10

# Children are drawn from the head's most probable tokens; any distribution known before the draw
# keeps the verification exact, and a short one keeps it cheap.
DRAFT_SUPPORT = 64


class DraftReader:
    """A recurrent head reading a batch: true positions for good, drafted ones for a while."""

    def __init__(self, head: "RecurrentHead", target: Target):
        self.head, self.target = head, target
        self.cache = DraftCache(len(head.layers))

    def read(self, committed: Committed) -> torch.Tensor:
        """Read committed positions; the outputs [B, 1, D] at the last one of each row."""
        count = committed.tokens.shape[1]
        states = self.head.encode(committed.features)
        causal = torch.ones(count, count, dtype=torch.bool, device=states.device).tril()
        positions = torch.arange(count, device=states.device)[None]
        if self.cache.lengths is not None:
            positions = positions + self.cache.lengths[:, None]
        outputs = self._pass(committed.tokens, states, positions, causal[None])
        self.cache.commit(committed.lengths)
        rows = torch.arange(outputs.shape[0], device=outputs.device)
        return outputs[rows, committed.lengths - 1][:, None]

    def draft(
        self,
        tokens: torch.Tensor,  # [B, n]
        parent_outputs: torch.Tensor,  # [B, n, D]
        depth: int,
        visible: torch.Tensor,  # [B or 1, n, pending + n] bool
    ) -> torch.Tensor:
        """The outputs [B, n, D] at drafted nodes of one depth, which stay pending.

        `visible` says which of the nodes drafted so far, and of these, each one descends from or
        is.
        """
        assert self.cache.lengths is not None
        positions = (self.cache.lengths[:, None] + depth - 1).expand_as(tokens)
        return self._pass(tokens, self.head.next_states(parent_outputs), positions, visible)

    def _pass(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        outputs = self.head.run_layers(
            self.head.embed(tokens, self.target),
            states,
            self.head.rotary(positions),
            self.cache.mask(visible),
            self.cache.append,
        )
        self.cache.stay(tokens.shape[1])
        return outputs


@dataclass(frozen=True)
class Level:
    """The nodes of one depth of a static tree that have children, and those children.

    `places` count the inner nodes of a level.
    """

    nodes: torch.Tensor  # [n] node indices
    parent_places: torch.Tensor  # [n] their parents among the inner nodes of the level before
    visible: torch.Tensor  # [1, n, m + n] ancestors among the m earlier inner nodes and these
    children: torch.Tensor  # [c] node indices
    child_places: torch.Tensor  # [c] their parents among `nodes`
    child_ranks: torch.Tensor  # [c]
    width: int  # most children of a node


def levels_of(shape: TreeShape, device: torch.device) -> list[Level]:
    """The levels of a static tree, from the root down; the root is never drafted, so not visible.

    The tree of paths (0,) (1,) (1, 0) has the levels with inner nodes 0, and 2: node 2 has the
    child 3.
    """
    parents, depths, ranks = shape.parents.tolist(), shape.depths.tolist(), shape.ranks.tolist()
    is_inner = set(parents)
    levels: list[Level] = []
    before: list[int] = []  # inner nodes of the level before
    drafted: list[int] = []  # inner nodes so far, without the root
    for depth in range(shape.depth):
        nodes = [n for n, d in enumerate(depths) if d == depth and n in is_inner]
        children = [n for n, d in enumerate(depths) if d == depth + 1]
        drafted += nodes if depth > 0 else []
        places = [
            torch.tensor(table, dtype=torch.long, device=device)
            for table in (
                nodes,
                [before.index(parents[n]) for n in nodes if depth > 0],
                children,
                [nodes.index(parents[n]) for n in children],
                [ranks[n] for n in children],
            )
        ]
        inner, parent_places, child_nodes, child_places, child_ranks = places
        visible = shape.ancestors.to(device)[inner][:, drafted][None]
        width = max(ranks[n] for n in children) + 1
        levels.append(
            Level(inner, parent_places, visible, child_nodes, child_places, child_ranks, width)
        )
        before = nodes
    return levels


class RecurrentDrafter(Drafter):
    """A recurrent head on dynamic trees, and on static ones where children are drawn.

    The static trees are the fixed one, or those grown from measured paths.
    """

    def __init__(self, head: "RecurrentHead", target: Target, shape: TreeShape | None):
        self.head, self.target, self.fixed = head, target, shape
        self.features = head.features_needed
        self.trees = StaticTrees(head.path_counts, head.depth, shape)
        self.draft_ids = head.draft_ids
        self.levels: dict[TreeShape, list[Level]] = {}
        # Every level is a pass of the head, so depth is a choice of its own.
        self.budgets = (
            self.trees.budgets
            if shape is not None
            else tuple(
                Budget(nodes, depth)
                for nodes in TREE_SIZES
                for depth in range(1, min(head.depth, nodes - 1) + 1)
            )
        )

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A fresh session; the first commit brings the features of the whole prompt."""
        return RecurrentSession(self)

    def levels_for(self, shape: TreeShape) -> list[Level]:
        """The tables of a static tree, built once."""
        if shape not in self.levels:
            self.levels[shape] = levels_of(shape, self.target.device)
        return self.levels[shape]


class RecurrentSession(DraftSession):
    """A recurrent head at work on one batch."""

    def __init__(self, drafter: RecurrentDrafter):
        self.drafter = drafter
        self.reader = DraftReader(drafter.head, drafter.target)
        self.unread: list[Committed] = []
        self.roots: torch.Tensor | None = None  # [B]
        self.outputs: torch.Tensor | None = None  # [B, 1, D], at the roots

    @torch.no_grad()
    def commit(self, committed: Committed) -> None:
        """Read the prompt at once; what follows is read when it is needed."""
        self.unread.append(committed)
        if self.roots is None:
            self._read()

    def _read(self) -> None:
        for committed in self.unread:
            self.outputs = self.reader.read(committed)
            rows = torch.arange(committed.tokens.shape[0], device=committed.tokens.device)
            self.roots = committed.tokens[rows, committed.lengths - 1]
        self.unread.clear()

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop the state of all other rows."""
        assert self.roots is not None and self.outputs is not None
        self.reader.cache.keep_rows(rows)
        self.roots, self.outputs = self.roots[rows], self.outputs[rows]
        self.unread = [
            Committed(c.tokens[rows], c.features.map(lambda t: t[rows]), c.lengths[rows])
            for c in self.unread
        ]

    @torch.no_grad()
    def propose(
        self, budget: Budget, sampling: SamplingConfig, random: RowRandom | None
    ) -> TokenTree:
        """Read what is new, then draft level by level."""
        self._read()
        drafter = self.drafter
        if random is None and drafter.fixed is None:
            tree = self._grown(budget)
        else:
            tree = self._filled(drafter.trees.shape(budget), sampling, random)
        self.reader.cache.discard()
        return tree

    def _logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.drafter.head.logits(outputs, self.drafter.target).float()

    def _token_ids(self, guesses: torch.Tensor) -> torch.Tensor:
        """Tokens of the head's guesses, which count the vocabulary that it has."""
        ids = self.drafter.draft_ids
        return guesses if ids is None else ids[guesses]

    def _grown(self, budget: Budget) -> TokenTree:
        """A tree that goes where the head is most sure of itself."""
        assert self.roots is not None and self.outputs is not None
        growth, outputs = TreeGrowth(self.roots), self.outputs
        visible = torch.zeros(1, 1, 0, dtype=torch.bool, device=outputs.device)
        for depth in range(1, budget.depth + 1):
            logits = self._logits(outputs)
            width = min(DYNAMIC_WIDTH, budget.nodes - 1, logits.shape[-1])
            best = logits.topk(width, dim=-1)
            log_probs = best.values - logits.logsumexp(-1, keepdim=True)
            growth.add_children(log_probs, self._token_ids(best.indices))
            if depth == budget.depth:
                break
            tokens, parent_places = growth.open_best(width)
            rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
            itself = torch.eye(width, dtype=torch.bool, device=tokens.device)
            above = visible.expand(len(rows), -1, -1)[rows, parent_places]
            visible = torch.cat([above, itself.expand(len(rows), -1, -1)], dim=-1)
            outputs = self.reader.draft(tokens, outputs[rows, parent_places], depth, visible)
        return growth.tree(budget.nodes)

    def _filled(
        self, shape: TreeShape, sampling: SamplingConfig, random: RowRandom | None
    ) -> TokenTree:
        """A tree of a given shape: the best guesses, or guesses drawn without replacement.

        The shape is settled before the first draw, and no drawn child is left out: both are what
        exact verification needs.
        """
        assert self.roots is not None and self.outputs is not None
        outputs, levels = self.outputs, self.drafter.levels_for(shape)
        tokens = self.roots[:, None].repeat(1, shape.num_nodes)
        supports: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids and probs [B, n, k], by level
        for depth, level in enumerate(levels):
            if depth > 0:
                outputs = self.reader.draft(
                    tokens[:, level.nodes], outputs[:, level.parent_places], depth, level.visible
                )
            logits = self._logits(outputs)
            if random is None:
                guesses = self._token_ids(logits.topk(level.width, dim=-1).indices)
            else:
                top = logits.topk(min(DRAFT_SUPPORT, logits.shape[-1]), dim=-1)
                ids, probs = self._token_ids(top.indices), probabilities(top.values, sampling)
                uniform = random.uniform(*probs.shape[1:])
                guesses = ids.gather(-1, draw_without_replacement(probs, level.width, uniform))
                supports.append((ids, probs))
            tokens[:, level.children] = guesses[:, level.child_places, level.child_ranks]
        if random is None:
            return TokenTree.from_shape(shape, tokens)
        ids, probs = (by_node(levels, parts, shape) for parts in zip(*supports, strict=True))
        return TokenTree.from_shape(shape, tokens, ids, probs)


def by_node(levels: list[Level], parts: Sequence[torch.Tensor], shape: TreeShape) -> torch.Tensor:
    """A table [B, N, k] of what the levels' inner nodes have, [B, n, k] each.

    Leaves have no children, but the table a row for them too: it repeats the root's.
    """
    table = parts[0][:, :1].repeat(1, shape.num_nodes, 1)
    for level, part in zip(levels, parts, strict=True):
        table[:, level.nodes] = part
    return table
