"""Recursive rejection: from the root down, child by child."""

import torch

from drafthead.core.sampling import RowRandom
from drafthead.core.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, deepest, path_to, register_verifier
from drafthead.infer.verifiers.match import match
from drafthead.infer.verifiers.refusals import DrawnChildren


@register_verifier("rejection", lossless=True, reads="probs", draws_children=True)
def rejection(
    tree: TokenTree,
    scores: torch.Tensor,  # [B, N, V]
    random: RowRandom | None,
) -> Acceptance:
    """Exact: recursive rejection sampling of children drawn without replacement.

    At each node the children are tried in the order in which they were drawn. Child x is accepted
    with probability min(1, target(x) / draft(x)); otherwise target <- norm(max(target - draft, 0)),
    draft <- draft without x, renormalised (Jeon et al., 2024, arXiv 2402.14160; Yang et al., 2024,
    arXiv 2401.15077). If no child is left, the bonus is drawn from what remains of the target. On a
    chain this is Leviathan's and Chen's rule. Children that were not drawn are matched: if the
    draft gave each child in turn probability 1, this rule would accept as often as `match`.
    """
    return reject_recursively(tree, scores, random, lenience=1.0)


def reject_recursively(
    tree: TokenTree, scores: torch.Tensor, random: RowRandom | None, lenience: float
) -> Acceptance:
    """Recursive rejection with draft probabilities multiplied by `lenience` in the test.

    `scores` [B, N, V] are the target's probabilities after each node.
    """
    assert random is not None
    if tree.draft_probs is None:
        return match(tree, scores, random)
    # Node n uses number n. The root needs none, so the bonus uses number 0: further nodes do not
    # change the numbers of the others.
    uniform = random.uniform(tree.num_nodes)  # [B, N]
    children = DrawnChildren(tree, scores)
    refusals = children.refuse(torch.ones_like(tree.tokens, dtype=tree.draft_probs.dtype))
    # Strictly below, since a number may be 0: a child of chance 0 never passes.
    passes = lenience * uniform < refusals.chance
    passes &= ~(children.earlier & passes[:, None]).any(-1)  # the first child that passes is taken
    passes[:, 0] = True
    node = deepest(tree, passes)
    return path_to(tree, node, children.bonus(refusals, node, uniform[:, 0]))
