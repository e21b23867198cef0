"""Traversal verification: whole paths are judged, from the leaves up."""

import torch

from drafthead.heads.sampling import RowRandom
from drafthead.heads.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, path_to, register_verifier
from drafthead.infer.verifiers.match import match
from drafthead.infer.verifiers.refusals import DrawnChildren


@register_verifier("traversal", lossless=True, reads="probs", draws_children=True)
def traversal(tree: TokenTree, scores: torch.Tensor, random: RowRandom | None) -> Acceptance:
    """Exact: traversal verification (Weng et al., 2025, arXiv 2505.12398).

    Nodes are tried from the first leaf upwards, each after all that hangs below it, and the first
    to pass is accepted with its whole path. A node x below a node of weight r has the weight
    min(1, r target(x) / draft(x)): what one token has too much, another on the path may lack. When
    a child is refused, its parent's target and weight r become

        norm(max(r target - draft, 0)),    s / (s + 1 - r)  with s = sum(max(r target - draft, 0)).

    A node passes with the weight that its refused children have left it; the root has weight 1 and
    keeps it. Why that is exact: by induction, a node of weight r that was drawn and any text behind
    it are said with r times the target probability of that text. On a chain this is block
    verification (Sun et al., 2024, arXiv 2403.10444), which accepts no less than any other rule for
    a chain. Children that were not drawn are matched: certain drafts leave nothing to balance, and
    what is said has the same law.
    """
    assert random is not None
    if tree.draft_probs is None:
        return match(tree, scores, random)
    # Node n tosses number n, and the root, which needs no coin, leaves its own to the bonus: a
    # longer tree leaves the others' places unchanged.
    uniform = random.uniform(tree.num_nodes)  # [B, N]
    children = DrawnChildren(tree, scores)
    weight = torch.ones_like(tree.tokens, dtype=scores.dtype)
    for depth in range(1, tree.max_depth + 1):
        weight = torch.where(tree.depths == depth, children.refuse(weight).chance, weight)
    refusals = children.refuse(weight)
    passes = uniform < refusals.weight_left
    turn = turns(tree, children.earlier)
    node = torch.where(passes, turn, tree.num_nodes).argmin(1)
    return path_to(tree, node, children.bonus(refusals, node, uniform[:, 0]))


def turns(tree: TokenTree, earlier: torch.Tensor) -> torch.Tensor:
    """When each node [B, N] is tried: after what hangs below it and below earlier siblings.

    Parents (-1, 0, 0, 1, 1) are the tree 0 (1 (3 4) 2), tried in the order 3 4 1 2 0: the turns of
    nodes 0 to 4 are 4, 2, 3, 0, 1. `earlier` [B, N, N] says which siblings come before a node.
    """
    sizes = tree.ancestors.sum(1)  # [B, N] of the subtrees
    before = (earlier * sizes[:, None]).sum(-1)  # nodes below earlier siblings
    return sizes - 1 + (tree.ancestors * before[:, None]).sum(-1)
