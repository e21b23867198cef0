"""EAGLE-2's dynamic tree (Li et al., 2024, arXiv 2406.16858): grown by the draft's own confidence.

The value of a node is the product of the draft's probabilities along its path, which estimates its
chance of being accepted. Each level opens the most valuable nodes of the level before; the most
valuable of all nodes seen make the tree. Everything is done for a batch at once, a tree a row.
"""

from collections.abc import Callable

import torch

from drafthead.heads.trees.tree import Budget, TokenTree

Children = tuple[torch.Tensor, torch.Tensor]  # log-probabilities and tokens [B, F, k] of F nodes'
# Passes over newly opened nodes of a depth: (tokens [B, F], places [B, F] of their parents among
# the nodes opened before, which opened nodes each of them sees [B, F, opened], depth).
Expand = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Children]
# Whether to pass over opened nodes, by the logarithms [B, F] of their values.
GoesOn = Callable[[torch.Tensor], bool]


def as_values(log_probs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [...] as what a path's score changes by: never above 0, and no NaN.

    Rounding must not make a child more valuable than its parent, and neither must a damaged draft,
    whose NaN would be sorted before everything else. See `TreeGrowth.best`.
    """
    return log_probs.clamp_max(0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


class TreeGrowth:
    """The candidates for a batch of trees, numbered in the order of their depth; the root is 0.

    Use: `add_children` of the root; then, level by level, `open_best` and `add_children` of the
    opened nodes; `tree` at the end.
    """

    def __init__(self, roots: torch.Tensor):
        """`roots` [B] are the tokens of the roots."""
        self.opened = torch.zeros_like(roots[:, None])  # [B, F] numbers of the open candidates
        self.opened_scores = self.opened.float()  # [B, F] logs of their values
        # One tensor [B, candidates] a level, from the root on.
        self.scores = [self.opened_scores]
        self.tokens = [roots[:, None]]
        self.parents = [self.opened - 1]  # candidate numbers

    def add_children(
        self,
        log_probs: torch.Tensor,  # [B, F, k] float32
        tokens: torch.Tensor,  # [B, F, k]
    ) -> None:
        """Give each open node k children, with the draft's log-probability of each."""
        scores = self.opened_scores[..., None] + as_values(log_probs)
        self.scores.append(scores.flatten(1))
        self.tokens.append(tokens.flatten(1))
        self.parents.append(self.opened[..., None].expand_as(tokens).flatten(1))

    def open_best(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Open the `count` most valuable nodes of the deepest level.

        Returns their tokens [B, F] and the places [B, F] of their parents among the nodes that
        were open until now.
        """
        width = self.scores[-1].shape[1] // self.opened.shape[1]
        order = self.scores[-1].sort(dim=1, descending=True, stable=True).indices[:, :count]
        before = sum(level.shape[1] for level in self.scores[:-1])
        self.opened = order + before
        self.opened_scores = self.scores[-1].gather(1, order)
        return self.tokens[-1].gather(1, order), order // width

    def best(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, parents and scores [B, N] of the most valuable candidates, for `slots` [N], the
        numbers from 0 on.

        Of equals the one with the lower number comes first. A child is never more valuable than its
        parent and has a higher number, so no node is chosen without its parent. With candidates 1
        and 2 under the root of values .6 and .4, and 3 and 4 under candidate 1 of values .6 and 0,
        three nodes are the root, 1 and 3, with parents (-1, 0, 1).
        """
        scores, tokens, parents = (
            torch.cat(levels, dim=1) for levels in (self.scores, self.tokens, self.parents)
        )
        order = scores.sort(dim=1, descending=True, stable=True).indices
        # Not cut: a compiled graph for any N knows nothing of how many candidates there are.
        chosen = order.index_select(1, slots).sort(dim=1).values  # [B, N] candidate numbers
        node = torch.zeros_like(parents)  # that each candidate became
        node.scatter_(1, chosen, slots.expand_as(chosen))
        above = node.gather(1, parents.gather(1, chosen).clamp_min(0))
        above = above.masked_fill(slots == 0, -1)
        return tokens.gather(1, chosen), above, scores.gather(1, chosen)

    def tree(self, num_nodes: int) -> TokenTree:
        """The trees of the most valuable candidates, at most `num_nodes` nodes with the root."""
        available = sum(level.shape[1] for level in self.scores)
        slots = torch.arange(min(num_nodes, available), device=self.opened.device)
        width = min(self.scores[1].shape[1], len(slots) - 1)
        tokens, parents, scores = self.best(slots)
        return TokenTree.from_parents(tokens, parents, len(self.scores) - 1, width, scores)


def dynamic_tree(
    roots: torch.Tensor,  # [B]
    budget: Budget,
    children: Children,
    expand: Expand,
    goes_on: GoesOn | None = None,
) -> TokenTree:
    """The tree after roots [B] of a drafter that needs a pass for each level but the first.

    `children` are those of the roots, [B, 1, k]; as many nodes of each level get children of their
    own, by `expand`. Opened nodes x, y and z under x see ``x``, ``y`` and ``x z``: the rows
    ``1 . .``, ``. 1 .`` and ``1 . 1``, of which `expand` is given each when its node is opened.

    Where `goes_on` says no, the tree has the levels so far and as large a share of the nodes.
    """
    growth = TreeGrowth(roots)
    growth.add_children(*children)
    width = children[0].shape[-1]
    rows = torch.arange(roots.shape[0], device=roots.device)[:, None]
    visible = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=roots.device)
    for depth in range(1, budget.depth):
        tokens, above = growth.open_best(width)
        if goes_on is not None and not goes_on(growth.opened_scores):
            break
        itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=roots.device)
        visible = torch.cat([visible[rows, above], itself.expand(len(rows), -1, -1)], dim=-1)
        growth.add_children(*expand(tokens, above, visible, depth))
    levels = len(growth.scores) - 1
    return growth.tree(1 + (budget.nodes - 1) * levels // budget.depth)
