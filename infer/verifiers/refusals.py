"""The rest of the target after refused children: the arithmetic of rejection and traversal.

The children of a node were drawn without replacement. They are tried in the order of the draw:
child x is accepted with probability min(1, target(x) / draft(x)), and if it is refused

    target <- norm(max(target - draft, 0)),    draft <- draft without x, renormalised,

so that child and remainder together are exactly the target. No random number is needed for this: a
child is tried only when all before it were refused, so the chances and remainders of all nodes are
computed at once, one rank of children after the other.

A node may itself be accepted only with some weight below 1. Then `weight x target` replaces the
target, and the missing 1 - weight is the probability of one more outcome, "this node is not
accepted", which no draft ever proposes. The same arithmetic covers it.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from drafthead.core.sampling import sample
from drafthead.core.trees.tree import PADDING, TokenTree


@dataclass(frozen=True)
class Refusals:
    """The rest after the children of every node were tried and all of them refused.

    Refusals subtract draft probabilities alone, so outside the draft's support the target keeps its
    proportions: k numbers describe what is left of V.
    """

    chance: torch.Tensor  # [B, N] that a node is accepted when it is tried; 0 for the root
    weight: torch.Tensor  # [B, N] of the nodes before their children were tried
    left: torch.Tensor  # [B, N, k] of weight x target on the support; not normalised
    mass: torch.Tensor  # [B, N] of everything that is left, "not accepted" included

    @property
    def weight_left(self) -> torch.Tensor:
        """The chance [B, N] of each node to be accepted after all of its children were refused."""
        return 1 - (1 - self.weight) / self.mass


class DrawnChildren:
    """The up to W children of every node, and the distribution from which each was drawn."""

    def __init__(self, tree: TokenTree, scores: torch.Tensor):
        """`tree` must have draft probabilities; `scores` [B, N, V] are the target's."""
        assert tree.draft_ids is not None and tree.draft_probs is not None
        self.ids, self.scores = tree.draft_ids, scores
        # In the draft's float64: only there are what remains of it and its quotients exact enough.
        on_support = scores.gather(2, self.ids).to(tree.draft_probs.dtype)  # [B, N, k]
        # A node without a law, as after an end where a processor forbids every token, is a leaf.
        self.on_support = on_support.nan_to_num(0)
        self.earlier = earlier_siblings(tree)  # [B, N, N]
        self.slots = child_slots(tree, self.earlier)  # [B, N]
        here = self.ids[:, :, None] == tokens_by_slot(tree, self.slots)[..., None]  # [B, N, W, k]
        self.places = here.int().argmax(-1, keepdim=True)  # [B, N, W, 1] of a child in the support
        gone = here.cumsum(2) > here  # drawn before this child
        unused = tree.draft_probs[:, :, None].masked_fill(gone, 0)
        self.tiny = torch.finfo(unused.dtype).tiny
        # Only a sum of 0 is below `tiny`, see `draft_distribution`.
        unused = unused / unused.sum(-1, keepdim=True).clamp_min(self.tiny)
        self.child_draft = (unused * here).sum(-1)  # [B, N, W]; 0 where there is no child
        # A filler child after an exhausted draft was not drawn: to try it must change nothing.
        self.draft = unused * (self.child_draft > 0)[..., None]  # [B, N, W, k]

    def refuse(self, weight: torch.Tensor) -> Refusals:
        """Try and refuse all children of all nodes, which have `weight` [B, N]."""
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
        """A token [B] drawn with uniform [B] from what the refusals left at node [B].

        It is NO_TOKEN where the target's probabilities are NaN.
        """
        rows = torch.arange(node.shape[0], device=node.device)
        target_probs = self.scores[rows, node]  # [B, V]
        remaining = target_probs * refusals.weight[rows, node, None]
        remaining = remaining.scatter(1, self.ids[rows, node], refusals.left[rows, node])
        # Only by rounding can nothing be left; then any token of the target will do.
        nothing_left = remaining.sum(1, keepdim=True) <= 0
        return sample(torch.where(nothing_left, target_probs, remaining), uniform)


def earlier_siblings(tree: TokenTree) -> torch.Tensor:
    """Marks [B, N, N] of the nodes (columns) that are tried before a node (row) under its parent.

    For parents (-1, 0, 0, 1, 0) row 4 holds 1 and 2. Padding is never tried.
    """
    same_parent = tree.parents[:, :, None] == tree.parents[:, None]
    return (same_parent & (tree.tokens >= 0)[:, None]).tril(-1)


def child_slots(tree: TokenTree, earlier: torch.Tensor) -> torch.Tensor:
    """The place of each node [B, N] in a table of `width` children for every node.

    For parents (-1, 0, 0, 1) and width 2, nodes 1, 2, 3 are at 0, 1, 2. `earlier` [B, N, N] is that
    of `earlier_siblings`.
    """
    past_end = tree.num_nodes * tree.width  # for the root and padding, which are nobody's children
    is_child = (tree.parents >= 0) & (tree.tokens >= 0)
    return torch.where(is_child, tree.parents * tree.width + earlier.sum(-1), past_end)


def tokens_by_slot(tree: TokenTree, slots: torch.Tensor) -> torch.Tensor:
    """The tokens [B, N, width] of every node's children, by `slots` [B, N]; PADDING for none.

    Tokens 9 5 6 7 of parents (-1, 0, 0, 1) and width 2 give (5, 6) for node 0, (7, PADDING) for 1.
    """
    rows, num_nodes = slots.shape
    table = tree.tokens.new_full((rows, num_nodes * tree.width + 1), PADDING)
    table.scatter_(1, slots, tree.tokens)
    return table[:, :-1].view(rows, num_nodes, tree.width)
