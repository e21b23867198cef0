"""The most probable token tree of a head that scores every child by its real parent.

A block-parallel head gives candidates for each depth in one pass; how probable a candidate is
depends on the tokens before it. The tree grows level by level, for all rows of a batch at once and
without asking the device for anything.
"""

from typing import Protocol

import torch

from drafthead.heads.trees.dynamic import TreeGrowth
from drafthead.heads.trees.tree import Budget, TokenTree


class Scorer(Protocol):
    """What a head knows of one block: candidates by depth, scored behind any parent."""

    candidates: torch.Tensor  # [B, K, k], different tokens at each depth

    def begin(self) -> torch.Tensor:
        """The state [B, 1, R] in front of the roots of a block."""
        ...

    def log_probs(
        self, depth: int, parents: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [B, F, k] of the candidates of a depth (0 is the first).

        They stand behind the parents [B, F]; `state` [B, F, R] is the one in front of the parents,
        and the one behind them [B, F, R] is given back.
        """
        ...


def best_first_tree(roots: torch.Tensor, scorer: Scorer, budget: Budget) -> TokenTree:
    """The most probable paths behind roots [B] that fit the budget.

    A path's score is the sum of its tokens' log-probabilities: what popping a heap of paths N times
    would give (DDTree, arXiv 2604.12989), with children scored by their real parent (DominoTree,
    arXiv 2607.08642). Of equal nodes the shallower goes first, then the one under the better
    parent, then the earlier candidate. With candidates x (log-probability -0.1) and y (-2.4) at two
    depths, behind any parent, four nodes are the root, x (-0.1), y (-2.4) and x x (-0.2).
    """
    growth, tokens, state = TreeGrowth(roots), roots[:, None], scorer.begin()
    depths = min(budget.depth, scorer.candidates.shape[1], budget.nodes - 1)
    for depth in range(depths):
        log_probs, behind = scorer.log_probs(depth, tokens, state)
        growth.add_children(log_probs, scorer.candidates[:, depth, None].expand_as(log_probs))
        if depth + 1 < depths:
            # Beside a node of the next depth and the path to it, so many have room on this one.
            tokens, above = growth.open_best(budget.nodes - 2 - depth)
            state = behind.gather(1, above[..., None].expand(-1, -1, behind.shape[2]))
    return growth.tree(budget.nodes)
