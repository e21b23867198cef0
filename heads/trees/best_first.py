"""The most probable token tree of a head that scores every child by its real parent.

A block-parallel head computes candidates for each depth in one pass; the probability of a candidate
depends on the tokens before it. The tree grows level by level, for all rows of a batch at once and
without waiting for the device.
"""

from typing import Protocol

import torch

from drafthead.heads.trees.dynamic import TreeGrowth


class Scorer(Protocol):
    """A head's candidates for one block, by depth, and their scores after any parent."""

    candidates: torch.Tensor  # [B, K, k], different tokens at each depth

    def begin(self) -> torch.Tensor:
        """The state [B, 1, R] before the roots of a block."""
        ...

    def log_probs(
        self, depth: int, parents: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [B, F, k] of the candidates of a depth (0 is the first).

        They come after the tokens `parents` [B, F]. `state` [B, F, R] is the state before these
        tokens; the state after them, [B, F, R], is returned too.
        """
        ...


def best_first_growth(
    roots: torch.Tensor, scorer: Scorer, levels: int, frontier: int
) -> TreeGrowth:
    """The candidates of trees after roots [B] of up to `levels` levels and `frontier` + 2 nodes.

    A path's score is the sum of its tokens' log-probabilities: what popping a heap of paths N times
    would give (DDTree, arXiv 2604.12989), with children scored by their real parent (DominoTree,
    arXiv 2607.08642). Of equal nodes the shallower goes first, then the one under the better
    parent, then the earlier candidate. With candidates x (log-probability -0.1) and y (-2.4) at two
    depths, after any parent, four nodes are the root, x (-0.1), y (-2.4) and x x (-0.2).

    Beside the root and a node of the next depth, a tree has room for `frontier` nodes of a depth:
    no others need children. More levels or a wider frontier than a tree needs change nothing in it.
    """
    growth, tokens, state = TreeGrowth(roots), roots[:, None], scorer.begin()
    slots = torch.arange(frontier, device=roots.device)
    for depth in range(levels):
        log_probs, after = scorer.log_probs(depth, tokens, state)
        growth.add_children(log_probs, scorer.candidates[:, depth, None].expand_as(log_probs))
        if depth + 1 < levels:
            tokens, above = growth.open_best(slots[: growth.scores[-1].shape[1]])
            state = after.gather(1, above[..., None].expand(-1, -1, after.shape[2]))
    return growth


def num_candidates(width: int, levels: int, frontier: int) -> int:
    """Nodes, with the root, that such a growth can choose from: `width` children of a node each.

    With 16 children, 2 levels and 6 nodes that get children, 1 + 16 + 96.
    """
    total, opened = 1, 1
    for _ in range(levels):
        children = opened * width
        total, opened = total + children, min(frontier, children)
    return total
