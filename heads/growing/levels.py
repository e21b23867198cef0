"""Drafting level by level: what a drafter is asked, and static trees filled with its guesses.

A level-wise drafter has two verbs: its session reads what was committed, and `Expand` guesses the
children of nodes of one depth. Draft heads, MTP layers, draft models and a target's own layers are
adapters of it; `filled_tree` and `dynamic.dynamic_tree` draw trees with any of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.sampling import (
    RowRandom,
    Sampling,
    draft_distribution,
    draw_without_replacement,
)
from drafthead.core.trees.tree import TokenTree, TreeShape


class Nodes(NamedTuple):
    """Nodes of one depth that are to get children."""

    tokens: torch.Tensor  # [B, n]
    states: torch.Tensor  # [B, n, S] of the drafter at their parents
    # [B or 1, n, P + n] which drafted nodes, these the last, each of them is or descends from. The
    # root is committed, so it is not among these.
    visible: torch.Tensor
    depth: int  # 0 for the root


class Guess(NamedTuple):
    """A drafter's guesses of the children of n nodes, and its states at the nodes."""

    states: torch.Tensor  # [B, n, S]
    logits: torch.Tensor  # [B, n, k] of the best guesses, the best first
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


Expand = Callable[[Nodes], Guess]


def blind(ahead: Guess) -> Expand:
    """The guesses of a drafter that has guessed all depths beforehand, whatever the tokens are.

    Node d of `ahead` stands for all nodes of depth d.
    """

    def expand(nodes: Nodes) -> Guess:
        count = nodes.tokens.shape[1]
        return Guess(*(part[:, nodes.depth, None].expand(-1, count, -1) for part in ahead))

    return expand


def known_at_roots(first: Guess, expand: Expand) -> Expand:
    """`expand`, but the guess at the roots is there already."""
    return lambda nodes: expand(nodes) if nodes.depth > 0 else first


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
    ranks: torch.Tensor  # [m] for each of them, which child of its parent it is
    visible: torch.Tensor  # [1, n, P + n] as in `Nodes`
    width: int  # the most children of a node


def levels_of(shape: TreeShape, device: torch.device) -> list[Level]:
    """The levels of depth 0 to shape.depth - 1."""
    parents, ranks = shape.parents.tolist(), shape.ranks.tolist()
    by_depth = [(shape.depths == d).nonzero()[:, 0].tolist() for d in range(shape.depth + 1)]
    levels: list[Level] = []
    inner_above = [-1]  # the root's parent
    drafted: list[int] = []  # inner nodes below the root, so far
    for here, below in pairwise(by_depth):
        inner = sorted({parents[node] for node in below})
        drafted += inner if levels else []
        level = Level(
            nodes=torch.tensor(inner, device=device),
            own=torch.tensor([here.index(node) for node in inner], device=device),
            above=torch.tensor([inner_above.index(parents[n]) for n in inner], device=device),
            parents=torch.tensor([inner.index(parents[node]) for node in below], device=device),
            ranks=torch.tensor([ranks[node] for node in below], device=device),
            visible=shape.ancestors[inner][:, drafted][None].to(device),
            width=1 + max(ranks[node] for node in below),
        )
        levels.append(level)
        inner_above = inner
    return levels


Support = tuple[torch.Tensor, torch.Tensor]  # ids and probabilities [B, n, k] of n nodes' children


def filled_tree(
    shape: TreeShape,
    levels: list[Level],
    roots: torch.Tensor,  # [B]
    states: torch.Tensor,  # [B, 1, S] before the roots
    expand: Expand,
    sampling: Sampling,
    random: Choice,
    scores: torch.Tensor | None = None,  # [N] of the shape's nodes, see `TokenTree`
) -> TokenTree:
    """A tree of a given shape: the best guesses, or as `random` chooses, see `propose`.

    `expand` is asked level by level for the children of inner nodes. Drawn children are drawn
    without replacement. Exact verification needs that the shape is fixed before the first draw, and
    that no drawn child is left out.
    """
    filled, supports = filled_levels(levels, roots, states, expand, sampling, random)
    if not isinstance(random, RowRandom):
        return TokenTree.from_shape(shape, filled, scores=scores)
    inner = torch.cat([level.nodes for level in levels])
    return TokenTree.from_shape(shape, filled, *for_all_nodes(supports, inner, shape.num_nodes))


def filled_levels(
    levels: list[Level],
    roots: torch.Tensor,  # [B]
    states: torch.Tensor,  # [B, 1, S] before the roots
    expand: Expand,
    sampling: Sampling,
    random: Choice,
) -> tuple[torch.Tensor, list[Support]]:
    """Tokens [B, N] of a tree as `filled_tree` fills it, and the supports of drawn children."""
    tokens, supports = [roots[:, None]], list[Support]()
    for depth, level in enumerate(levels):
        # Only inner nodes are asked: leaves have nobody to guess for.
        nodes = tokens[-1][:, level.own], states[:, level.above], level.visible
        states, logits, ids, _ = expand(Nodes(*nodes, depth))
        if isinstance(random, NextDraws):
            ids = ids.gather(-1, random.best(depth, logits, ids, level.width)[1])
        elif random is not None:
            probs = draft_distribution(logits, sampling)
            supports.append((ids, probs))
            uniform = random.uniform(*probs.shape[1:])
            ids = ids.gather(-1, draw_without_replacement(probs, level.width, uniform))
        tokens.append(ids[:, level.parents, level.ranks])
    return torch.cat(tokens, dim=1), supports


def for_all_nodes(supports: list[Support], nodes: torch.Tensor, num_nodes: int) -> Support:
    """Supports [B, N, k] of all nodes from those of the inner `nodes` [M], level by level.

    Leaves have no children to draw; their rows give token 0 probability 1.
    """
    inner_ids, inner_probs = (torch.cat(parts, dim=1) for parts in zip(*supports, strict=True))
    batch, _, size = inner_ids.shape
    ids = torch.arange(size, device=nodes.device).repeat(batch, num_nodes, 1)
    probs = (ids == 0).to(inner_probs.dtype)
    ids[:, nodes], probs[:, nodes] = inner_ids, inner_probs
    return ids, probs
