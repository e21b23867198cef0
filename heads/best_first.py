"""Token trees of a head that scores every child by its real parent.

A block-parallel head gives candidates for each depth in one pass; how probable a candidate is
depends on the tokens before it. Both kinds of tree are filled level by level, for all rows of a
batch at once and without asking the device for anything.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from drafthead.heads.sampling import (
    RowRandom,
    SamplingConfig,
    draw_without_replacement,
    probabilities,
)
from drafthead.heads.tree import Budget, TokenTree, TreeShape, ancestor_mask


class Scorer(Protocol):
    """What a head knows of one block: candidates by depth, scored behind any parent."""

    candidates: torch.Tensor  # [B, K, k], different token ids at each depth

    def begin(self, roots: torch.Tensor) -> torch.Tensor:
        """The state [B, 1, R] in front of the roots [B] of a block."""
        ...

    def log_probs(
        self, depth: int, parents: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [B, F, k] of the candidates of a depth (0 is the first).

        They stand behind the parents [B, F]; `state` [B, F, R] is the one in front of the parents,
        and the one behind them [B, F, R] is given back.
        """
        ...


@dataclass(frozen=True)
class _Level:
    """The best nodes of one depth, best first."""

    tokens: torch.Tensor  # [B, F]
    scores: torch.Tensor  # [B, F]
    parents: torch.Tensor  # [B, F], 0 for the root and i + 1 for node i of all levels together
    state: torch.Tensor  # [B, F, R], in front of the tokens


def best_first_tree(roots: torch.Tensor, scorer: Scorer, budget: Budget) -> TokenTree:
    """The most probable paths behind roots [B] that fit the budget.

    A path's score is the sum of its tokens' log-probabilities, so a child never scores above its
    parent and the best nodes form a tree: what popping a heap N times would give (DDTree, arXiv
    2604.12989). Of equal nodes the shallower goes first, then the one under the better parent, then
    the earlier candidate. With the candidates x (log-probability -0.1) and y (-2.4) at two depths,
    behind any parent, four nodes are the root, x (-0.1), y (-2.4) and x x (-0.2).
    """
    levels = _beams(roots, scorer, budget)
    scores, tokens, parents = (
        torch.cat(parts, dim=1)
        for parts in zip(*((x.scores, x.tokens, x.parents) for x in levels), strict=True)
    )  # [B, M] each, level behind level
    order = scores.argsort(dim=1, descending=True, stable=True)
    # In ascending order a parent stands before its children again.
    chosen = order[:, : budget.nodes - 1].sort(dim=1).values  # [B, N - 1]
    depths = torch.cat([torch.full_like(x.parents, d) for d, x in enumerate(levels, 1)], dim=1)
    root = chosen.new_zeros(chosen.shape[0], 1)
    # Which node of the tree each of the M became, and the root in front of them.
    numbers = torch.arange(1, chosen.shape[1] + 1, device=chosen.device).expand_as(chosen)
    places = torch.cat([root, torch.zeros_like(parents).scatter(1, chosen, numbers)], dim=1)
    parents = torch.cat([root - 1, places.gather(1, parents.gather(1, chosen))], dim=1)
    return TokenTree(
        tokens=torch.cat([roots[:, None], tokens.gather(1, chosen)], dim=1),
        parents=parents,
        depths=torch.cat([root, depths.gather(1, chosen)], dim=1),
        ancestors=ancestor_mask(parents),
        max_depth=len(levels),
        width=min(scorer.candidates.shape[2], chosen.shape[1]),
    )


def _beams(roots: torch.Tensor, scorer: Scorer, budget: Budget) -> list[_Level]:
    """For each depth as many of the best nodes as the budget can hold there.

    A node of depth d brings d - 1 ancestors and the root along, so nodes - d have a place.
    """
    num_depths, num_candidates = scorer.candidates.shape[1:]
    tokens, state = roots[:, None], scorer.begin(roots)
    scores = torch.zeros_like(tokens, dtype=torch.float32)
    levels: list[_Level] = []
    before = 0  # nodes above the parents, the root included
    for depth in range(min(num_depths, budget.depth, budget.nodes - 1)):
        log_probs, behind = scorer.log_probs(depth, tokens, state)
        paths = (scores[..., None] + log_probs).flatten(1)  # [B, F x k]
        order = paths.argsort(dim=1, descending=True, stable=True)[:, : budget.nodes - 1 - depth]
        above, rank = order // num_candidates, order % num_candidates
        level = _Level(
            tokens=scorer.candidates[:, depth].gather(1, rank),
            scores=paths.gather(1, order),
            parents=above + before,
            state=behind.gather(1, above[..., None].expand(-1, -1, behind.shape[2])),
        )
        levels.append(level)
        before += tokens.shape[1]
        tokens, scores, state = level.tokens, level.scores, level.state
    return levels


class ShapeLevels:
    """A static tree level by level, as the index tables that fill it."""

    def __init__(self, shape: TreeShape, device: torch.device):
        self.shape = shape
        self.first: list[int] = []  # node of each depth, and one past the last node
        self.under: list[torch.Tensor] = []  # per level: each child's parent among the parents
        self.ranks: list[torch.Tensor] = []  # per level: which child each is
        self.widths: list[int] = []  # per level: most children of one node
        for depth in range(shape.depth):
            children = shape.depths == depth + 1
            self.first.append(int((shape.depths < depth).sum()))
            self.under.append((shape.parents[children] - self.first[-1]).to(device))
            self.ranks.append(shape.ranks[children].to(device))
            self.widths.append(int(shape.ranks[children].max()) + 1)
        self.first += [int((shape.depths < shape.depth).sum()), shape.num_nodes]


def filled_tree(
    roots: torch.Tensor,
    scorer: Scorer,
    levels: ShapeLevels,
    sampling: SamplingConfig,
    random: RowRandom | None,
) -> TokenTree:
    """A tree of a given shape behind roots [B].

    Without `random` a node is its rank's best candidate behind its real parent. With it, children
    are drawn without replacement from the distribution behind their real parent, on the candidates.
    """
    shape, num_candidates = levels.shape, scorer.candidates.shape[2]
    tokens, state = [roots[:, None]], scorer.begin(roots)
    uniform = None if random is None else random.uniform(shape.num_nodes, num_candidates)
    supports: list[tuple[torch.Tensor, torch.Tensor]] = []
    for depth in range(shape.depth):
        log_probs, behind = scorer.log_probs(depth, tokens[-1], state)
        candidates = scorer.candidates[:, depth, None].expand_as(log_probs)  # [B, F, k]
        if uniform is None:
            order = log_probs.topk(levels.widths[depth], dim=-1).indices
        else:
            probs = probabilities(log_probs, sampling)
            chance = uniform[:, levels.first[depth] : levels.first[depth + 1]]
            order = draw_without_replacement(probs, levels.widths[depth], chance)
            supports.append((candidates, probs))
        tokens.append(candidates.gather(2, order)[:, levels.under[depth], levels.ranks[depth]])
        state = behind[:, levels.under[depth]]
    all_tokens = torch.cat(tokens, dim=1)
    if uniform is None:
        return TokenTree.from_shape(shape, all_tokens)
    # The last level has no children, but the tables have a row for each node.
    last = (table[:, :1].expand(-1, tokens[-1].shape[1], -1) for table in supports[-1])
    parts = zip(*supports, last, strict=True)
    draft_ids, draft_probs = (torch.cat(tables, dim=1) for tables in parts)
    return TokenTree.from_shape(shape, all_tokens, draft_ids, draft_probs)
