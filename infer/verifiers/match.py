"""The rule that needs to know nothing of the drafter."""

import torch

from drafthead.heads.sampling import RowRandom, sample
from drafthead.heads.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, path_to, register_verifier


@register_verifier("match", lossless=True, reads="probs", follows=True)
def match(tree: TokenTree, scores: torch.Tensor, random: RowRandom | None) -> Acceptance:
    """Exact: draw the target's own token at each node and go on while it is among the children.

    The answer is plain sampling whatever the tree proposes, so the tree may be formed and filled in
    any way that does not know these draws. The draft's probabilities are not used. Each token is
    drawn with the number that plain decoding would take for it: the same seed gives the same text
    with any drafter and any tree, as without one. This walks down from the root and draws only the
    tokens that it needs; graphs draw all of them and `follow`.
    """
    assert random is not None
    uniform = random.ahead(tree.max_depth + 1)  # [B, depth + 1]
    rows = torch.arange(scores.shape[0], device=scores.device)
    node = bonus = torch.zeros_like(rows)
    walking = torch.ones_like(rows, dtype=torch.bool)
    for depth in range(tree.max_depth + 1):
        said = sample(scores[rows, node], uniform[:, depth])  # [B]
        bonus = torch.where(walking, said, bonus)
        follows = (tree.parents == node[:, None]) & (tree.tokens == said[:, None])  # [B, N]
        walking = walking & follows.any(1)
        node = torch.where(walking, follows.int().argmax(1), node)
        if scores.device.type == "cpu" and not walking.any():
            break  # free on a CPU; on a GPU it would cost a synchronisation
    return path_to(tree, node, bonus)
