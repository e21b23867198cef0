"""Heads that draft depth by depth, each guess knowing the tokens drafted before it.

A state stands for what is known at a node: `advance` takes the node's token into its parent's
state, `logits` guesses the node's children from the result. On a static tree one batched call of
each fills a whole depth, and every node is scored behind its real path.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch

from drafthead.heads.anchors import AnchoredHead, tokens_at
from drafthead.heads.base import Committed, Drafter, DraftSession, HeadBatch
from drafthead.heads.draft_layers import DraftCache
from drafthead.heads.errors import UserError
from drafthead.heads.sampling import (
    DRAFT_SUPPORT,
    RowRandom,
    SamplingConfig,
    draw_without_replacement,
    probabilities,
)
from drafthead.heads.target import FeatureSpec, Target
from drafthead.heads.tree import Budget, StaticTrees, TokenTree, TreeShape


class SequentialHead(AnchoredHead):
    """A head whose state grows with the drafted path; the first state comes from the target."""

    @property
    def features_needed(self) -> FeatureSpec:
        """The hidden state after the final norm."""
        return FeatureSpec(layers=(), last=True)

    def contexts(self, hidden: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """First states [B, T, S] of packed rows, from hidden [B, T, D] and segments [B, T]."""
        return self.start(hidden)

    def new_cache(self) -> DraftCache | None:
        """What `read` remembers of committed positions; None for a head that need not."""
        return None

    def read(
        self, hidden: torch.Tensor, lengths: torch.Tensor, cache: DraftCache | None
    ) -> torch.Tensor:
        """First states [B, S] at the last of the newly committed positions [B, T] of each row."""
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return self.start(hidden[rows, lengths - 1])

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """First states [..., S] from hidden [..., D] at the same positions."""
        return hidden

    @abstractmethod
    def advance(
        self, state: torch.Tensor, tokens: torch.Tensor, index: int, target: Target
    ) -> torch.Tensor:
        """The states [..., S'] of nodes of depth `index`.

        From the states [..., S] of their parents, or first states for the root, and their own
        tokens [...].
        """

    def states(
        self, batch: HeadBatch, rows: torch.Tensor, anchors: torch.Tensor, target: Target
    ) -> Iterable[torch.Tensor]:
        """States [A, S] along the true tokens behind each anchor."""
        assert batch.features.last is not None
        state = self.contexts(batch.features.last, batch.segments)[rows, anchors]
        for index in range(self.depth):
            tokens = tokens_at(batch, rows, anchors, index + 1)
            state = self.advance(state, tokens, index, target)
            yield state

    def drafter(self, target: Target, shape: TreeShape | None = None) -> Drafter:
        """The head on static trees, by default those grown from its measured acceptance."""
        return SequentialDrafter(self, target, shape)


@dataclass(frozen=True)
class Level:
    """The inner nodes of one depth of a static tree, and where their children are.

    Of a tree with the paths (0,) (1,) (1, 0) (1, 1), numbered 1 to 4, depth 1 has one inner node:
    `nodes` (2), second of its depth: `own` (1), under the first inner node of depth 0: `above` (0).
    The nodes of depth 2 are children 0 and 1 of that one: `parents` (0, 0), `ranks` (0, 1).
    """

    nodes: torch.Tensor  # [n]
    own: torch.Tensor  # [n] places among all nodes of their depth
    above: torch.Tensor  # [n] places of their parents among the inner nodes one depth up
    parents: torch.Tensor  # [m] for each node one depth down, its parent's place in `nodes`
    ranks: torch.Tensor  # [m] and which child it is
    width: int  # most children of one of the nodes


def levels_of(shape: TreeShape, device: torch.device) -> list[Level]:
    """The levels of depth 0 to shape.depth - 1."""
    parents, ranks = shape.parents.tolist(), shape.ranks.tolist()
    by_depth = [(shape.depths == d).nonzero()[:, 0].tolist() for d in range(shape.depth + 1)]
    levels, inner_above = [], [-1]  # the root's parent
    for here, below in pairwise(by_depth):
        inner = sorted({parents[node] for node in below})
        level = Level(
            nodes=torch.tensor(inner, device=device),
            own=torch.tensor([here.index(node) for node in inner], device=device),
            above=torch.tensor([inner_above.index(parents[n]) for n in inner], device=device),
            parents=torch.tensor([inner.index(parents[node]) for node in below], device=device),
            ranks=torch.tensor([ranks[node] for node in below], device=device),
            width=1 + max(ranks[node] for node in below),
        )
        levels.append(level)
        inner_above = inner
    return levels


class SequentialDrafter(Drafter):
    """A sequential head that fills static trees."""

    def __init__(self, head: SequentialHead, target: Target, shape: TreeShape | None):
        """Raises UserError when the tree is deeper than the head drafts."""
        if shape is not None and shape.depth > head.depth:
            raise UserError(
                f"a token tree of depth {shape.depth} does not fit a {head.family} head that "
                f"drafts {head.depth} tokens"
            )
        self.head, self.target = head, target
        self.features = head.features_needed
        self.trees = StaticTrees(head.path_counts, head.depth, shape)
        self.budgets = self.trees.budgets
        self.known_levels: dict[TreeShape, list[Level]] = {}

    def levels(self, shape: TreeShape) -> list[Level]:
        """The levels of a tree, made once for each shape."""
        if shape not in self.known_levels:
            self.known_levels[shape] = levels_of(shape, self.target.device)
        return self.known_levels[shape]

    def chances(self, budget: Budget) -> tuple[float, ...]:
        """As measured after training."""
        return self.trees.chances(budget) or super().chances(budget)

    def identity(self) -> str:
        """The shape of the head."""
        return repr(self.head.config)

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session; the prompt itself is not needed, its features come with the first commit."""
        return SequentialSession(self)


Support = tuple[torch.Tensor, torch.Tensor]  # ids and probabilities [B, n, k] of n nodes' children


class SequentialSession(DraftSession):
    """A sequential head at work: a first state a row, and what its head remembers."""

    def __init__(self, drafter: SequentialDrafter):
        self.drafter = drafter
        self.cache = drafter.head.new_cache()
        self.state: torch.Tensor | None = None  # [B, S], where the root was predicted
        self.roots: torch.Tensor | None = None  # [B]

    @torch.no_grad()
    def commit(self, committed: Committed) -> None:
        """Keep the root and the first state where it was predicted."""
        rows = torch.arange(committed.lengths.shape[0], device=committed.tokens.device)
        hidden = committed.features.last
        assert hidden is not None
        self.state = self.drafter.head.read(hidden, committed.lengths, self.cache)
        self.roots = committed.tokens[rows, committed.lengths - 1]

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop the state of all other rows."""
        assert self.state is not None and self.roots is not None
        self.state, self.roots = self.state[rows], self.roots[rows]
        if self.cache is not None:
            self.cache.keep_rows(rows)

    @torch.no_grad()
    def propose(
        self, budget: Budget, sampling: SamplingConfig, random: RowRandom | None
    ) -> TokenTree:
        """Fill the tree depth by depth with the head's best guesses, or with drawn ones."""
        assert self.state is not None and self.roots is not None
        head, target = self.drafter.head, self.drafter.target
        shape = self.drafter.trees.shape(budget)
        shape = shape if random is None else shape.gapless
        levels = self.drafter.levels(shape)
        states, tokens = self.state[:, None], [self.roots[:, None]]
        supports: list[Support] = []
        for index, level in enumerate(levels):
            own = tokens[-1][:, level.own]  # [B, n]
            states = head.advance(states[:, level.above], own, index, target)
            logits = head.logits(states, index, target)  # [B, n, V]
            if random is None:
                guesses = logits.topk(level.width, dim=-1).indices  # [B, n, width]
            else:
                guesses, support = drawn(logits, level.width, sampling, random)
                supports.append(support)
            tokens.append(guesses[:, level.parents, level.ranks])
        filled = torch.cat(tokens, dim=1)
        if random is None:
            return TokenTree.from_shape(shape, filled)
        nodes = torch.cat([level.nodes for level in levels])
        return TokenTree.from_shape(shape, filled, *for_all_nodes(supports, nodes, shape.num_nodes))


def drawn(
    logits: torch.Tensor,  # [B, n, V]
    count: int,
    sampling: SamplingConfig,
    random: RowRandom,
) -> tuple[torch.Tensor, Support]:
    """Tokens [B, n, count] drawn without replacement, and the distributions they came from."""
    top = logits.topk(min(DRAFT_SUPPORT, logits.shape[-1]), dim=-1)
    probs = probabilities(top.values, sampling)
    order = draw_without_replacement(probs, count, random.uniform(*probs.shape[1:]))
    return top.indices.gather(-1, order), (top.indices, probs)


def for_all_nodes(supports: list[Support], nodes: torch.Tensor, num_nodes: int) -> Support:
    """Supports [B, N, k] of all nodes from those of the inner `nodes` [M], level by level.

    Leaves have no children to draw; their rows say that token 0 is certain.
    """
    inner_ids, inner_probs = (torch.cat(parts, dim=1) for parts in zip(*supports, strict=True))
    batch, _, size = inner_ids.shape
    ids = torch.arange(size, device=nodes.device).repeat(batch, num_nodes, 1)
    probs = (ids == 0).to(inner_probs.dtype)
    ids[:, nodes], probs[:, nodes] = inner_ids, inner_probs
    return ids, probs
