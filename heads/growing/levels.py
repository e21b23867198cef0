"""Static trees filled depth by depth, each node's children guessed after its real path."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.sampling import (
    DRAFT_SUPPORT,
    RowRandom,
    Sampling,
    draft_distribution,
    draw_without_replacement,
    largest,
)
from drafthead.core.trees.tree import TokenTree, TreeShape


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
    width: int  # the most children of a node


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


Guesses = tuple[torch.Tensor, torch.Tensor]  # logits and ids [B, n, k] of n nodes, best first
Support = tuple[torch.Tensor, torch.Tensor]  # ids and probabilities [B, n, k] of n nodes' children


def best_guesses(
    logits: torch.Tensor,
    tokens_of: Callable[[torch.Tensor], torch.Tensor],
    count: int = DRAFT_SUPPORT,
    largest: Callable[..., tuple[torch.Tensor, ...]] = largest,
) -> Guesses:
    """The most probable tokens after nodes with logits [B, n, Vd], and their logits in float32.

    `tokens_of` says which tokens places among the logits stand for; `largest` finds them, as
    `sampling.largest` does.
    """
    best, places, _ = largest(logits, count)
    return best, tokens_of(places)


def filled_tree(
    shape: TreeShape,
    levels: list[Level],
    roots: torch.Tensor,  # [B]
    guess: Callable[[int, Level, torch.Tensor], Guesses],
    sampling: Sampling,
    random: Choice,
    scores: torch.Tensor | None = None,  # [N] of the shape's nodes, see `TokenTree`
) -> TokenTree:
    """A tree of a given shape: the best guesses, or as `random` chooses, see `propose`.

    `guess(depth, level, tokens)` is called level by level with the tokens [B, n] of the level's
    inner nodes. Drawn children are drawn without replacement. Exact verification needs that the
    shape is fixed before the first draw, and that no drawn child is left out.
    """
    tokens, supports = [roots[:, None]], []
    for depth, level in enumerate(levels):
        # Only inner nodes are asked: leaves have nobody to guess for.
        logits, ids = guess(depth, level, tokens[-1][:, level.own])
        if isinstance(random, NextDraws):
            ids = ids.gather(-1, random.best(depth, logits, ids, level.width)[1])
        elif random is not None:
            probs = draft_distribution(logits, sampling)
            supports.append((ids, probs))
            uniform = random.uniform(*probs.shape[1:])
            ids = ids.gather(-1, draw_without_replacement(probs, level.width, uniform))
        tokens.append(ids[:, level.parents, level.ranks])
    filled = torch.cat(tokens, dim=1)
    if not isinstance(random, RowRandom):
        return TokenTree.from_shape(shape, filled, scores=scores)
    nodes = torch.cat([level.nodes for level in levels])
    return TokenTree.from_shape(shape, filled, *for_all_nodes(supports, nodes, shape.num_nodes))


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
