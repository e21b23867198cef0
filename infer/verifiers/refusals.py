"""What refused children leave of the target: the arithmetic that rejection and traversal share.

The children of a node were drawn without replacement. They are tried in the order of the draw:
child x is accepted with chance min(1, target(x) / draft(x)), and if it is refused

    target <- norm(max(target - draft, 0)),    draft <- draft without x, renormalised,

which makes child and remainder together exactly the target. No coin enters: a child has its turn
only when all before it were refused, so chances and remainders of all nodes are known beforehand
and are worked out at once, one rank of children after the other.

A node may itself be accepted only with some weight below 1. Then `weight x target` takes the
target's place, and the missing 1 - weight is the share of one more outcome, "this node is not
accepted", which no draft ever proposes: the same arithmetic covers it.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from drafthead.heads.sampling import sample
from drafthead.heads.trees.tree import PADDING, TokenTree


@dataclass(frozen=True)
class Refusals:
    """The children of every node, tried one after the other and all of them refused.

    Refusals only take draft mass away, so outside the support the target keeps its proportions:
    k numbers describe what is left of V.
    """

    chance: torch.Tensor  # [B, N] of each node to be accepted when its turn comes; 0 for the root
    weight: torch.Tensor  # [B, N] with which the nodes started
    left: torch.Tensor  # [B, N, k] of weight x target on the support, in the end; not normalised
    mass: torch.Tensor  # [B, N] of all that is left, "not accepted" included

    @property
    def weight_left(self) -> torch.Tensor:
        """The chance [B, N] of each node to be accepted after all of its children were refused."""
        return 1 - (1 - self.weight) / self.mass


class DrawnChildren:
    """The up to W children of every node, and the distribution from which each was drawn."""

    def __init__(self, tree: TokenTree, scores: torch.Tensor):
        """`tree` with draft probabilities, `scores` [B, N, V] the target's probabilities."""
        assert tree.draft_ids is not None and tree.draft_probs is not None
        self.ids, self.scores = tree.draft_ids, scores
        self.on_support = scores.gather(2, self.ids)  # [B, N, k]
        self.earlier = earlier_siblings(tree)  # [B, N, N]
        self.slots = child_slots(tree, self.earlier)  # [B, N]
        here = self.ids[:, :, None] == tokens_by_slot(tree, self.slots)[..., None]  # [B, N, W, k]
        self.places = here.int().argmax(-1, keepdim=True)  # [B, N, W, 1] of a child in the support
        gone = here.cumsum(2) > here  # drawn before this child
        unused = tree.draft_probs[:, :, None].masked_fill(gone, 0)
        self.tiny = torch.finfo(unused.dtype).tiny
        unused = unused / unused.sum(-1, keepdim=True).clamp_min(self.tiny)
        self.child_draft = (unused * here).sum(-1)  # [B, N, W]; 0 where there is no child
        # A filler behind an exhausted draft was not drawn: to try it changes nothing.
        self.draft = unused * (self.child_draft > 0)[..., None]  # [B, N, W, k]

    def refuse(self, weight: torch.Tensor) -> Refusals:
        """Try all children of all nodes, of weight [B, N], and refuse them."""
        left = weight[..., None] * self.on_support
        outside = (1 - left.sum(-1, keepdim=True)).clamp_min(0)  # which no child can take away
        mass = torch.ones_like(outside)
        lefts, masses = [left], [mass]  # before each rank's children are tried, and in the end
        for rank in range(self.draft.shape[2]):
            left = (left - mass * self.draft[:, :, rank]).clamp_min(0)
            mass = left.sum(-1, keepdim=True) + outside
            lefts.append(left)
            masses.append(mass)
        wanted = torch.stack(lefts, 2)[:, :, :-1].gather(-1, self.places).squeeze(-1)
        drafted = torch.cat(masses, -1)[..., :-1] * self.child_draft
        chances = (wanted / drafted.clamp_min(self.tiny)).clamp_max(1)
        chances = torch.where(self.child_draft > 0, chances, 0).flatten(1)
        chance = pad(chances, (0, 1)).gather(1, self.slots)
        return Refusals(chance, weight, left, mass.squeeze(-1).clamp_min(self.tiny))

    def bonus(self, refusals: Refusals, node: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """A token [B] of what the refusals left of the target at node [B], from uniform [B]."""
        rows = torch.arange(node.shape[0], device=node.device)
        target_probs = self.scores[rows, node]  # [B, V]
        remaining = target_probs * refusals.weight[rows, node, None]
        remaining = remaining.scatter(1, self.ids[rows, node], refusals.left[rows, node])
        nothing_left = remaining.sum(1, keepdim=True) <= 0  # by rounding alone
        return sample(torch.where(nothing_left, target_probs, remaining), uniform)


def earlier_siblings(tree: TokenTree) -> torch.Tensor:
    """Which nodes [B, N, N] (columns) are tried before a node (row) under the same parent.

    For parents (-1, 0, 0, 1, 0) row 4 holds 1 and 2. Padding is never tried.
    """
    same_parent = tree.parents[:, :, None] == tree.parents[:, None]
    return (same_parent & (tree.tokens >= 0)[:, None]).tril(-1)


def child_slots(tree: TokenTree, earlier: torch.Tensor) -> torch.Tensor:
    """Where each node [B, N] stands in a table of `width` children for every node.

    For parents (-1, 0, 0, 1) and width 2 nodes 1, 2, 3 stand at 0, 1, 2; the root and padding,
    which are nobody's children, at 8, behind the table.
    """
    behind = tree.num_nodes * tree.width
    is_child = (tree.parents >= 0) & (tree.tokens >= 0)
    return torch.where(is_child, tree.parents * tree.width + earlier.sum(-1), behind)


def tokens_by_slot(tree: TokenTree, slots: torch.Tensor) -> torch.Tensor:
    """The tokens [B, N, width] of every node's children, PADDING where there is none."""
    rows, num_nodes = slots.shape
    table = tree.tokens.new_full((rows, num_nodes * tree.width + 1), PADDING)
    table.scatter_(1, slots, tree.tokens)
    return table[:, :-1].view(rows, num_nodes, tree.width)
