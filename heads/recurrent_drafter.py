"""Drafting with a recurrent head: its cache, and the trees that it grows or fills."""

from typing import TYPE_CHECKING

import torch

from drafthead.heads.base import Committed, Drafter, DraftSession
from drafthead.heads.draft_layers import DraftCache
from drafthead.heads.dynamic_tree import TreeGrowth
from drafthead.heads.sampling import RowRandom, SamplingConfig
from drafthead.heads.sequential import Level, Support, drawn, for_all_nodes, levels_of
from drafthead.heads.target import Target
from drafthead.heads.tree import Budget, StaticTrees, TokenTree, TreeShape

if TYPE_CHECKING:
    from drafthead.heads.recurrent import RecurrentHead

# Children of a node, and nodes of a level that get children, in a dynamic tree (EAGLE-2's k).
DYNAMIC_WIDTH = 10

# Sizes of dynamic tree that are worth telling apart, and the most nodes that a level is worth.
DYNAMIC_SIZES = (2, 4, 8, 16, 32, 64)
NODES_A_LEVEL = 13


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
        embeds = self.head.embed(committed.tokens, self.target)
        outputs = self._pass(embeds, states, positions, causal[None])
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
        embeds, states = self.head.drafted(tokens, parent_outputs, self.target)
        return self._pass(embeds, states, positions, visible)

    def draft_blindly(self, roots: torch.Tensor, outputs: torch.Tensor, depth: int) -> torch.Tensor:
        """The outputs [B, depth - 1, D] at depths 1 to depth - 1, for any tokens there.

        Roots [B] and their outputs [B, 1, D] lend only their shapes; see `drafts_blindly`.
        """
        assert self.cache.lengths is not None
        ahead = torch.arange(depth - 1, device=roots.device)
        tokens, outputs = (t.expand(-1, depth - 1, *t.shape[2:]) for t in (roots[:, None], outputs))
        embeds, states = self.head.drafted(tokens, outputs, self.target)
        causal = torch.ones(depth - 1, depth - 1, dtype=torch.bool, device=roots.device).tril()
        return self._pass(embeds, states, self.cache.lengths[:, None] + ahead, causal[None])

    def _pass(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        outputs = self.head.run_layers(
            embeds,
            states,
            self.head.rotary(positions),
            self.cache.mask(visible),
            self.cache.append,
        )
        self.cache.stay(embeds.shape[1])
        return outputs


class RecurrentDrafter(Drafter):
    """A recurrent head on dynamic trees, and on static ones where children are drawn.

    The static trees are the fixed one, or those grown from measured paths.
    """

    def __init__(self, head: "RecurrentHead", target: Target, shape: TreeShape | None):
        self.head, self.target, self.fixed = head, target, shape
        self.features = head.features_needed
        self.trees = StaticTrees(head.path_counts, head.depth, shape)
        self.draft_ids = head.draft_ids
        self.budgets = self.trees.budgets if shape is not None else dynamic_budgets(head.depth)
        self.known_levels: dict[TreeShape, list[tuple[Level, torch.Tensor]]] = {}

    def chances(self, budget: Budget) -> tuple[float, ...]:
        """As measured after training for the best static tree, which a dynamic one should match."""
        return self.trees.chances(budget) or super().chances(budget)

    def identity(self) -> str:
        """The shape of the head, and of a fixed tree."""
        return repr((self.head.config, self.fixed))

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A fresh session; the first commit brings the features of the whole prompt."""
        return RecurrentSession(self)

    def levels(self, shape: TreeShape) -> list[tuple[Level, torch.Tensor]]:
        """The levels of a static tree, each with `visible_nodes`, made once for each shape."""
        if shape not in self.known_levels:
            levels = levels_of(shape, self.target.device)
            self.known_levels[shape] = list(zip(levels, visible_nodes(shape, levels), strict=True))
        return self.known_levels[shape]


def dynamic_budgets(depth: int) -> tuple[Budget, ...]:
    """Budgets of a drafter for which each level of a tree is a pass, so that depth is a choice."""
    return tuple(
        Budget(nodes, levels)
        for nodes in DYNAMIC_SIZES
        for levels in range(1, depth + 1)
        if levels < nodes <= NODES_A_LEVEL * levels
    )


def visible_nodes(shape: TreeShape, levels: list[Level]) -> list[torch.Tensor]:
    """For each level [1, n, m + n]: what its n inner nodes see of themselves and of the m before.

    The root is not drafted, so it is not among them. Of a tree with the paths (0,) (1,) (1, 0) and
    a child of each leaf, inner nodes 1 2, then 3, see: 1 sees 1, 2 sees 2, and 3 sees 2 and 3.
    """
    visible, drafted = [], levels[0].nodes[:0]
    for depth, level in enumerate(levels):
        if depth > 0:
            drafted = torch.cat([drafted, level.nodes])
        visible.append(shape.ancestors.to(drafted.device)[level.nodes][:, drafted][None])
    return visible


class RecurrentSession(DraftSession):
    """A recurrent head at work on one batch."""

    def __init__(self, drafter: RecurrentDrafter):
        self.drafter = drafter
        self.reader = DraftReader(drafter.head, drafter.target)
        self.unread: list[Committed] = []
        self.roots: torch.Tensor | None = None  # [B]
        self.outputs: torch.Tensor | None = None  # [B, 1, D], at the roots
        self.ahead: torch.Tensor | None = None  # [B, depth - 1, D], of a head that drafts blindly

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
            self._look_ahead(budget.depth)
            tree = self._grown(budget)
        else:
            shape = drafter.trees.shape(budget)
            self._look_ahead(shape.depth)
            tree = self._filled(shape, sampling, random)
        self.reader.cache.discard()
        return tree

    def _look_ahead(self, depth: int) -> None:
        """Draft all depths of a tree at once, if the head can."""
        if self.drafter.head.drafts_blindly and depth > 1:
            assert self.roots is not None and self.outputs is not None
            self.ahead = self.reader.draft_blindly(self.roots, self.outputs, depth)

    def _drafted(
        self, tokens: torch.Tensor, parent_outputs: torch.Tensor, depth: int, visible: torch.Tensor
    ) -> torch.Tensor:
        """The outputs [B, n, D] at drafted nodes of one depth; see `DraftReader.draft`."""
        if self.ahead is None:
            return self.reader.draft(tokens, parent_outputs, depth, visible)
        return self.ahead[:, depth - 1, None].expand(-1, tokens.shape[1], -1)

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
            outputs = self._drafted(tokens, outputs[rows, parent_places], depth, visible)
        return growth.tree(budget.nodes)

    def _filled(
        self, shape: TreeShape, sampling: SamplingConfig, random: RowRandom | None
    ) -> TokenTree:
        """A tree of a given shape: the best guesses, or guesses drawn without replacement.

        The shape is settled before the first draw, and no drawn child is left out: both are what
        exact verification needs.
        """
        assert self.roots is not None and self.outputs is not None
        shape = shape if random is None else shape.gapless
        outputs, tokens = self.outputs, [self.roots[:, None]]
        supports: list[Support] = []
        levels = self.drafter.levels(shape)
        for depth, (level, visible) in enumerate(levels):
            if depth > 0:
                own = tokens[-1][:, level.own]
                outputs = self._drafted(own, outputs[:, level.above], depth, visible)
            logits = self._logits(outputs)
            if random is None:
                guesses = logits.topk(level.width, dim=-1).indices  # [B, n, width]
            else:
                guesses, (ids, probs) = drawn(logits, level.width, sampling, random)
                supports.append((self._token_ids(ids), probs))
            tokens.append(self._token_ids(guesses[:, level.parents, level.ranks]))
        filled = torch.cat(tokens, dim=1)
        if random is None:
            return TokenTree.from_shape(shape, filled)
        nodes = torch.cat([level.nodes for level, _ in levels])
        return TokenTree.from_shape(shape, filled, *for_all_nodes(supports, nodes, shape.num_nodes))
