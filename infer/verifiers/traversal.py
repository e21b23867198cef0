"""Traversal verification: whole paths are accepted or refused, from the leaves up."""

import torch

from drafthead.core.sampling import RowRandom
from drafthead.core.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, path_to, register_verifier
from drafthead.infer.verifiers.match import match
from drafthead.infer.verifiers.refusals import DrawnChildren


@register_verifier("traversal", lossless=True, reads="probs", draws_children=True)
def traversal(
    tree: TokenTree,
    scores: torch.Tensor,  # [B, N, V]
    random: RowRandom | None,
) -> Acceptance:
    """Exact: traversal verification (Weng et al., 2025, arXiv 2505.12398).

    Nodes are tried from the first leaf upwards, each after its whole subtree, and the first that
    passes is accepted with its path. A child x of a node of weight r has the weight
    min(1, r target(x) / draft(x)): surplus of one token makes up for the lack of another on the
    path. When a child is refused, its parent's target and weight r become

        norm(max(r target - draft, 0)),    s / (s + 1 - r)  with s = sum(max(r target - draft, 0)).

    A node passes with the weight that is left after its refused children; the root keeps weight 1.
    Why this is exact: by induction, a drawn node of weight r followed by any text is output with r
    times the target's probability of that text. On a chain this is block verification (Sun et al.,
    2024, arXiv 2403.10444), which accepts no less than any other rule for a chain. Children that
    were not drawn are matched: their draft probability of 1 leaves nothing to balance, and the
    output has the same distribution.
    """
    assert random is not None
    if tree.draft_probs is None:
        return match(tree, scores, random)
    # Node n uses number n. The root needs none, so the bonus uses number 0: further nodes do not
    # change the numbers of the others.
    uniform = random.uniform(tree.num_nodes)  # [B, N]
    children = DrawnChildren(tree, scores)
    weight = torch.ones_like(tree.tokens, dtype=tree.draft_probs.dtype)
    # Weights go down: a child's follows from its parent's. Only then are paths tried upwards.
    for depth in range(1, tree.max_depth + 1):
        weight = torch.where(tree.depths == depth, children.refuse(weight).chance, weight)
    refusals = children.refuse(weight)
    passes = uniform < refusals.weight_left
    turn = turns(tree, children.earlier)
    # The root's turn is the last, and with weight 1 it always passes.
    node = torch.where(passes, turn, tree.num_nodes).argmin(1)
    return path_to(tree, node, children.bonus(refusals, node, uniform[:, 0]))


def turns(tree: TokenTree, earlier: torch.Tensor) -> torch.Tensor:
    """The turn [B, N] of each node: after its subtree and those of earlier siblings.

    Parents (-1, 0, 0, 1, 1) are the tree 0 (1 (3 4) 2), tried in the order 3 4 1 2 0: the turns of
    nodes 0 to 4 are 4, 2, 3, 0, 1. `earlier` [B, N, N] is that of `earlier_siblings`.
    """
    sizes = tree.ancestors.sum(1)  # [B, N] of the subtrees
    before = (earlier * sizes[:, None]).sum(-1)  # [B, N] nodes in subtrees of earlier siblings
    return sizes - 1 + (tree.ancestors * before[:, None]).sum(-1)
