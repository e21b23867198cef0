"""The rule that needs nothing from the drafter but the tree."""

import torch

from drafthead.core.sampling import RowRandom
from drafthead.core.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, path_to, register_verifier


@register_verifier("match", lossless=True, reads="probs", follows=True)
def match(
    tree: TokenTree,
    scores: torch.Tensor,  # [B, N, V]
    random: RowRandom | None,
) -> Acceptance:
    """Exact: draw the target's own token at each node and go on while it is among the children.

    The answer is plain sampling whatever the tree proposes. The draft's probabilities are not used.
    Each token is drawn with the numbers that plain decoding would use: the same seed gives the same
    text with any drafter and tree, and without one. A draft may read these numbers beforehand, as
    `NextDraws`: it cannot change the target's draw, only guess it more often. This walks down from
    the root and draws only the tokens that it needs.
    """
    assert random is not None
    keys = random.ahead(tree.max_depth + 1)  # [B, depth + 1]
    rows = torch.arange(scores.shape[0], device=scores.device)
    node = bonus = torch.zeros_like(rows)
    walking = torch.ones_like(rows, dtype=torch.bool)
    for depth in range(tree.max_depth + 1):
        token = random.token(scores[rows, node], keys[:, depth])  # [B] the target's own
        bonus = torch.where(walking, token, bonus)
        follows = (tree.parents == node[:, None]) & (tree.tokens == token[:, None])  # [B, N]
        walking = walking & follows.any(1)
        node = torch.where(walking, follows.int().argmax(1), node)
        if scores.device.type == "cpu" and not walking.any():
            break  # the test is free on a CPU; on a GPU it would cost a synchronisation
    return path_to(tree, node, bonus)
