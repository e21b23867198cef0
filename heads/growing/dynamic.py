"""EAGLE-2's dynamic tree (Li et al., 2024, arXiv 2406.16858): grown by the draft's own confidence.

The value of a node is the product of the draft's probabilities along its path, which estimates its
chance of being accepted. Each level opens the most valuable nodes of the level before; the most
valuable of all nodes seen make the tree. Everything is done for a batch at once, a tree a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch

from drafthead.core.backend import Backend
from drafthead.core.coupling import NextDraws
from drafthead.core.kv_cache.column_cache import move_columns, visible_columns
from drafthead.core.sampling import largest
from drafthead.core.trees.tree import Budget, TokenTree, TreeTables
from drafthead.heads.growing.levels import Expand, Guess, Nodes

# Whether to pass over opened nodes, by the logarithms [B, F] of their values.
GoesOn = Callable[[torch.Tensor], bool]


def as_values(log_probs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [...] as what a path's score changes by: never above 0, and no NaN.

    Rounding must not make a child more valuable than its parent, and neither must a damaged draft,
    whose NaN would be sorted before everything else. See `Growth.best`.
    """
    return log_probs.clamp_max(0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


class Growth(NamedTuple):
    """Trees between two levels of their growth. Tensors alone, for recorded code.

    Candidates are numbered in the order of their depth; the root is 0.
    """

    scores: torch.Tensor  # [B, C] logs of values
    tokens: torch.Tensor  # [B, C]
    parents: torch.Tensor  # [B, C] candidate numbers
    opened: torch.Tensor  # [B, F] numbers of the nodes whose children are the last candidates
    states: torch.Tensor  # [B, F, S] of the drafter at these nodes
    visible: torch.Tensor | None  # [B, F, P] which drafted nodes these see; None: none

    @classmethod
    def of(cls, roots: torch.Tensor, states: torch.Tensor) -> "Growth":
        """The roots [B] alone, which are open, with states [B, 1, S]."""
        number = torch.zeros_like(roots[:, None])
        return cls(number.float(), roots[:, None], number - 1, number, states, None)

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
        # Not cut: compiled code for any N knows nothing of how many candidates there are.
        chosen = order.index_select(1, slots).sort(dim=1).values  # [B, N] candidate numbers
        node = torch.zeros_like(parents)  # that each candidate became
        node.scatter_(1, chosen, slots.expand_as(chosen))
        above = node.gather(1, parents.gather(1, chosen).clamp_min(0))
        above = above.masked_fill(slots == 0, -1)
        return tokens.gather(1, chosen), above, self.scores.gather(1, chosen)


class Opened(NamedTuple):
    """The nodes of a level that are opened. Tensors alone."""

    numbers: torch.Tensor  # [B, n] among the candidates
    tokens: torch.Tensor  # [B, n]
    states: torch.Tensor  # [B, n, S] at their parents
    visible: torch.Tensor  # [B, n, P + n] which drafted nodes they see, see `seen_after_opening`


def open_level(growth: Growth, slots: torch.Tensor, width: int) -> Opened:
    """Open the most valuable nodes of the deepest level, for `slots` [n], the numbers from 0.

    Each of the nodes that were opened last has `width` children.
    """
    earlier = growth.scores.shape[1] - growth.opened.shape[1] * width
    # Sorted and not `topk`: of equals the first must win on every device and at every size.
    order = growth.scores[:, earlier:].sort(dim=1, descending=True, stable=True).indices
    order = order.index_select(1, slots)
    numbers, above = order + earlier, order // width
    states = growth.states.gather(1, above[..., None].expand(-1, -1, growth.states.shape[2]))
    visible = seen_after_opening(growth.visible, above, slots)
    return Opened(numbers, growth.tokens.gather(1, numbers), states, visible)


def with_children(
    growth: Growth,
    opened: torch.Tensor,  # [B, n] numbers of candidates
    log_probs: torch.Tensor,  # [B, n, k] float32
    tokens: torch.Tensor,  # [B, n, k]
) -> Growth:
    """The growth with k children of each of n nodes, which are open now."""
    scores = growth.scores.gather(1, opened)[..., None] + as_values(log_probs)
    added = scores, tokens, opened[..., None].expand_as(tokens)
    pairs = zip(growth[:3], added, strict=True)
    scores, tokens, parents = (torch.cat([was, more.flatten(1)], dim=1) for was, more in pairs)
    return growth._replace(scores=scores, tokens=tokens, parents=parents, opened=opened)


def best_tree(growth: Growth, slots: torch.Tensor, levels: int) -> TreeTables:
    """The trees of the N most valuable candidates, for `slots` [N], the numbers from 0; no
    candidate is deeper than `levels`.
    """
    return TreeTables.of(*growth.best(slots), levels)


@dataclass(frozen=True)
class Operations:
    """Functions that draw trees, of which a backend may have kernels."""

    largest: Callable[..., tuple[torch.Tensor, ...]] = largest
    visible_columns: Callable[..., torch.Tensor] = visible_columns
    move_columns: Callable[..., None] = move_columns
    open_level: Callable[..., Opened] = open_level
    with_children: Callable[..., Growth] = with_children
    best_tree: Callable[..., TreeTables] = best_tree

    @classmethod
    def of(cls, backend: Backend) -> Self:
        """The kernels of a backend, and functions of ours where it has none."""
        return cls(*(backend.replacement_of(getattr(cls, field.name)) for field in fields(cls)))


OURS = Operations()


def first_level(
    roots: torch.Tensor,  # [B]
    guess: Guess,  # n = 1, at the roots
    width: int,
    draws: NextDraws | None = None,  # of the roots' children, as depth 0
    operations: Operations = OURS,
) -> Growth:
    """The roots and `width` children of each."""
    growth = Growth.of(roots, guess.states)
    return operations.with_children(growth, growth.opened, *guess.best(width, 0, draws))


def next_level(
    growth: Growth,
    slots: torch.Tensor,  # [n], the numbers from 0, of the nodes to open
    width: int,
    expand: Callable[[Opened], Guess],
    draws: NextDraws | None = None,  # of the opened nodes' children, as depth 0
    operations: Operations = OURS,
) -> Growth:
    """The growth after one more level: its best nodes are opened and get `width` children each."""
    opened = operations.open_level(growth, slots, width)
    guess = expand(opened)
    grown = operations.with_children(growth, opened.numbers, *guess.best(width, 0, draws))
    return Growth(*grown[:4], guess.states, opened.visible)


def dynamic_tree(
    roots: torch.Tensor,  # [B]
    guess: Guess,  # n = 1, at the roots
    budget: Budget,
    width: int,
    expand: Expand,
    draws: NextDraws | None = None,
    goes_on: GoesOn | None = None,
) -> TokenTree:
    """The tree after roots [B] of a drafter that needs a pass for each level but the first.

    Of each level the nodes that need children get `width`, by `expand`. Where `goes_on` says no,
    the tree has the levels so far and as large a share of the nodes.
    """
    growth, levels = first_level(roots, guess, width, draws), 1
    slots = torch.arange(budget.nodes, device=roots.device)
    for depth in range(1, budget.depth):
        available = growth.opened.shape[1] * width
        count = num_opened(budget.nodes, depth, width, available)
        opened = open_level(growth, slots[:count], width)
        if goes_on is not None and not goes_on(growth.scores.gather(1, opened.numbers)):
            break
        guess, levels = expand(Nodes(*opened[1:], depth)), depth + 1
        growth = with_children(growth, opened.numbers, *guess.best(width, depth, draws))
        growth = growth._replace(states=guess.states, visible=opened.visible)
    nodes = min(1 + (budget.nodes - 1) * levels // budget.depth, growth.scores.shape[1])
    return best_tree(growth, slots[:nodes], levels).tree(levels, width)


def num_opened(nodes: int, depth: int, width: int, available: int) -> int:
    """The number of the `available` candidates of a depth that need children in a tree of `nodes`.

    At most `width`. Others cannot have any in that tree: it has `depth` nodes above them, those of
    their depth that are more valuable, themselves, and a child. With 8 nodes, 6 of depth 1.
    """
    return max(1, min(width, nodes - 1 - depth, available))


def seen_after_opening(
    visible: torch.Tensor | None,  # [B, F, P] which drafted nodes each open node sees; None: none
    above: torch.Tensor,  # [B, n] places of the parents of n newly opened ones among these
    slots: torch.Tensor,  # [n], the numbers from 0
) -> torch.Tensor:
    """The drafted nodes that each newly opened node sees, [B, n, P + n]: its parent's, and itself.

    Opened nodes x, y and z under x see ``x``, ``y`` and ``x z``: with the rows ``1 .`` and ``. 1``
    of x and y, and above (0), the row of z is ``1 . 1``.
    """
    # Not one table for all rows: a recording writes what it returns into memory of its own.
    itself = (slots[:, None] == slots).repeat(above.shape[0], 1, 1)
    if visible is None:
        return itself
    before = visible.gather(1, above[..., None].expand(-1, -1, visible.shape[2]))
    return torch.cat([before, itself], dim=-1)
