"""EAGLE-2's dynamic tree (Li et al., 2024, arXiv 2406.16858): grown by the draft's own confidence.

The value of a node is the product of the draft's probabilities along its path, which estimates its
chance of being accepted. Each level opens the most valuable nodes of the level before; the most
valuable of all nodes seen make the tree. Everything is done for a batch at once, a tree a row.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from drafthead.core.trees.tree import Budget, TokenTree, TreeTables

Children = tuple[torch.Tensor, torch.Tensor]  # log-probabilities and tokens [B, F, k] of F nodes'
# Passes over newly opened nodes of a depth: (tokens [B, F], places [B, F] of their parents among
# the nodes opened before, which opened nodes each of them sees [B, F, opened], depth).
Expand = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Children]
# Whether to pass over opened nodes, by the logarithms [B, F] of their values.
GoesOn = Callable[[torch.Tensor], bool]


def as_values(log_probs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [...] as what a path's score changes by: never above 0, and no NaN.

    Rounding must not make a child more valuable than its parent, and neither must a damaged draft,
    whose NaN would be sorted before everything else. See `Candidates.best`.
    """
    return log_probs.clamp_max(0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


class Candidates(NamedTuple):
    """A growth between two calls of compiled code. Tensors alone."""

    scores: torch.Tensor  # [B, C] logs of values
    tokens: torch.Tensor  # [B, C]
    parents: torch.Tensor  # [B, C] candidate numbers
    opened: torch.Tensor  # [B, F] numbers of the nodes whose children are the last candidates

    def best(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, parents and scores [B, N] of the most valuable candidates, for `slots` [N], the
        numbers from 0 on.

        Of equals the one with the lower number comes first. A child is never more valuable than its
        parent and has a higher number, so no node is chosen without its parent. With candidates 1
        and 2 under the root of values .6 and .4, and 3 and 4 under candidate 1 of values .6 and 0,
        three nodes are the root, 1 and 3, with parents (-1, 0, 1).
        """
        tokens, parents = self.tokens, self.parents
        order = self.scores.sort(dim=1, descending=True, stable=True).indices
        # Not cut: a compiled graph for any N knows nothing of how many candidates there are.
        chosen = order.index_select(1, slots).sort(dim=1).values  # [B, N] candidate numbers
        node = torch.zeros_like(parents)  # that each candidate became
        node.scatter_(1, chosen, slots.expand_as(chosen))
        above = node.gather(1, parents.gather(1, chosen).clamp_min(0))
        above = above.masked_fill(slots == 0, -1)
        return tokens.gather(1, chosen), above, self.scores.gather(1, chosen)


class TreeGrowth:
    """The candidates for a batch of trees, numbered in the order of their depth; the root is 0.

    Use: `add_children` of the root; then, level by level, `open_best` and `add_children` of the
    opened nodes; `tree` at the end.
    """

    def __init__(self, roots: torch.Tensor):
        """`roots` [B] are the tokens of the roots."""
        self.opened = torch.zeros_like(roots[:, None])  # [B, F] numbers of the open candidates
        self.opened_scores = self.opened.float()  # [B, F] logs of their values
        # One tensor [B, candidates] a level or several, from the root on.
        self.scores = [self.opened_scores]
        self.tokens = [roots[:, None]]
        self.parents = [self.opened - 1]  # candidate numbers
        self.deepest = self.scores[0], self.tokens[0]  # of the children of the open candidates

    @classmethod
    def resumed(cls, candidates: Candidates, width: int) -> "TreeGrowth":
        """Go on with what `candidates` returned, where each open node had `width` children."""
        growth, opened = cls.__new__(cls), candidates.opened
        growth.opened, growth.opened_scores = opened, candidates.scores.gather(1, opened)
        # Not cut into levels: of the children of one node, 1 candidate would be left, and a graph
        # that has seen 1 is for no other number.
        growth.scores, growth.tokens, growth.parents = ([table] for table in candidates[:3])
        earlier = candidates.scores.shape[1] - opened.shape[1] * width
        growth.deepest = candidates.scores[:, earlier:], candidates.tokens[:, earlier:]
        return growth

    def candidates(self) -> Candidates:
        """All candidates, for `resumed`."""
        scores, tokens, parents = (
            torch.cat(levels, dim=1) for levels in (self.scores, self.tokens, self.parents)
        )
        return Candidates(scores, tokens, parents, self.opened)

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
        self.deepest = self.scores[-1], self.tokens[-1]

    def open_best(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Open the F most valuable nodes of the deepest level, for `slots` [F], the numbers from 0.

        Returns their tokens [B, F] and the places [B, F] of their parents among the nodes that
        were open until now.
        """
        scores, tokens = self.deepest
        width = scores.shape[1] // self.opened.shape[1]
        # Sorted and not `topk`: of equals the first must win on every device and at every size.
        order = scores.sort(dim=1, descending=True, stable=True).indices.index_select(1, slots)
        before = sum(part.shape[1] for part in self.scores) - scores.shape[1]
        self.opened = order + before
        self.opened_scores = scores.gather(1, order)
        return tokens.gather(1, order), order // width

    def tree(self, num_nodes: int) -> TokenTree:
        """The trees of the most valuable candidates, at most `num_nodes` nodes with the root."""
        available = sum(level.shape[1] for level in self.scores)
        slots = torch.arange(min(num_nodes, available), device=self.opened.device)
        levels, width = len(self.scores) - 1, self.scores[1].shape[1]
        return best_tree(self.candidates(), slots, levels).tree(levels, width)


class Opened(NamedTuple):
    """The nodes of a level that are opened. Tensors alone."""

    numbers: torch.Tensor  # [B, n] among the candidates
    tokens: torch.Tensor  # [B, n]
    parents: torch.Tensor  # [B, n, D] outputs at their parents
    visible: torch.Tensor  # [B, n, P + n] which drafted nodes they see, see `seen_after_opening`


def open_level(
    candidates: Candidates,
    outputs: torch.Tensor,  # [B, F, D] at the nodes that were opened last
    visible: torch.Tensor | None,  # [B, F, P] which drafted nodes they see; None: none
    slots: torch.Tensor,  # [n], the numbers from 0
    width: int,  # children of each of them
) -> Opened:
    """Open the n most valuable nodes of the deepest level."""
    growth = TreeGrowth.resumed(candidates, width)
    tokens, above = growth.open_best(slots)
    parents = outputs.gather(1, above[..., None].expand(-1, -1, outputs.shape[2]))
    return Opened(growth.opened, tokens, parents, seen_after_opening(visible, above, slots))


def with_children(
    candidates: Candidates,
    opened: torch.Tensor,  # [B, n] numbers of candidates
    log_probs: torch.Tensor,  # [B, n, k] float32
    tokens: torch.Tensor,  # [B, n, k]
) -> Candidates:
    """The candidates, and k children of each of some."""
    growth = TreeGrowth.resumed(candidates._replace(opened=opened), 0)
    growth.add_children(log_probs, tokens)
    return growth.candidates()


def best_tree(candidates: Candidates, slots: torch.Tensor, levels: int) -> TreeTables:
    """The trees of the N most valuable candidates, for `slots` [N], the numbers from 0; no
    candidate is deeper than `levels`.
    """
    return TreeTables.of(*candidates.best(slots), levels)


def num_opened(nodes: int, depth: int, width: int, available: int) -> int:
    """How many of the `available` candidates of a depth need children, for a tree of `nodes` nodes.

    At most `width`. Others cannot have any in that tree: it has `depth` nodes above them, those of
    their depth that are more valuable, themselves, and a child. With 8 nodes, 6 of depth 1.
    """
    return max(1, min(width, nodes - 1 - depth, available))


def seen_after_opening(
    visible: torch.Tensor | None,  # [B, F, P] which drafted nodes each open node sees; None: none
    above: torch.Tensor,  # [B, n] places of the parents of n newly opened ones among these
    slots: torch.Tensor,  # [n], the numbers from 0
) -> torch.Tensor:
    """Which drafted nodes each newly opened node sees, [B, n, P + n]: those of its parent, itself.

    Opened nodes x, y and z under x see ``x``, ``y`` and ``x z``: with the rows ``1 .`` and ``. 1``
    of x and y, and above (0), the row of z is ``1 . 1``.
    """
    # Not one table for all rows: a recording writes what it returns into memory of its own.
    itself = (slots[:, None] == slots).repeat(above.shape[0], 1, 1)
    if visible is None:
        return itself
    before = visible.gather(1, above[..., None].expand(-1, -1, visible.shape[2]))
    return torch.cat([before, itself], dim=-1)


def dynamic_tree(
    roots: torch.Tensor,  # [B]
    budget: Budget,
    children: Children,
    expand: Expand,
    goes_on: GoesOn | None = None,
) -> TokenTree:
    """The tree after roots [B] of a drafter that needs a pass for each level but the first.

    `children` are those of the roots, [B, 1, k]; of each further level the nodes that need children
    get as many, by `expand`, which is told what each of them sees, see `seen_after_opening`.

    Where `goes_on` says no, the tree has the levels so far and as large a share of the nodes.
    """
    growth = TreeGrowth(roots)
    growth.add_children(*children)
    width, visible = children[0].shape[-1], None
    for depth in range(1, budget.depth):
        count = num_opened(budget.nodes, depth, width, growth.scores[-1].shape[1])
        slots = torch.arange(count, device=roots.device)
        tokens, above = growth.open_best(slots)
        if goes_on is not None and not goes_on(growth.opened_scores):
            break
        visible = seen_after_opening(visible, above, slots)
        growth.add_children(*expand(tokens, above, visible, depth))
    levels = len(growth.scores) - 1
    return growth.tree(1 + (budget.nodes - 1) * levels // budget.depth)
