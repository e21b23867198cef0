"""Recursive rejection: from the root down, child by child."""

import torch

from drafthead.heads.sampling import RowRandom
from drafthead.heads.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, deepest, path_to, register_verifier
from drafthead.infer.verifiers.match import match
from drafthead.infer.verifiers.refusals import DrawnChildren


@register_verifier("rejection", lossless=True, reads="probs", draws_children=True)
def rejection(tree: TokenTree, scores: torch.Tensor, random: RowRandom | None) -> Acceptance:
    """Exact: recursive rejection sampling of children drawn without replacement.

    At each node the children are tried in the order in which they were drawn. Child x is accepted
    with probability min(1, target(x) / draft(x)); otherwise target <- norm(max(target - draft, 0)),
    draft <- draft without x, renormalised (Jeon et al., 2024, arXiv 2402.14160; Yang et al., 2024,
    arXiv 2401.15077). If none is left the bonus is drawn from what remains of the target. A chain
    makes this Leviathan's and Chen's rule. Children that were not drawn are matched: with a draft
    that is certain of each child in turn this rule accepts with the same probabilities as `match`.
    """
    return reject_recursively(tree, scores, random, lenience=1.0)


def reject_recursively(
    tree: TokenTree, scores: torch.Tensor, random: RowRandom | None, lenience: float
) -> Acceptance:
    """Recursive rejection with draft probabilities multiplied by `lenience` in the test."""
    assert random is not None
    if tree.draft_probs is None:
        return match(tree, scores, random)
    # Node n tosses number n, and the root, which needs no coin, leaves its own to the bonus: a
    # longer tree leaves the others' places unchanged.
    uniform = random.uniform(tree.num_nodes)  # [B, N]
    children = DrawnChildren(tree, scores)
    refusals = children.refuse(torch.ones_like(tree.tokens, dtype=scores.dtype))
    passes = lenience * uniform < refusals.chance
    passes &= ~(children.earlier & passes[:, None]).any(-1)  # the first child that passes is taken
    passes[:, 0] = True
    node = deepest(tree, passes)
    return path_to(tree, node, children.bonus(refusals, node, uniform[:, 0]))
