"""The rule of temperature 0."""

import torch

from drafthead.core.sampling import RowRandom, most_probable
from drafthead.core.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, follow, register_verifier


@register_verifier("greedy", lossless=True, reads="logits", greedy=True, follows=True)
def greedy(
    tree: TokenTree,
    scores: torch.Tensor,  # [B, N, V]
    random: RowRandom | None,
) -> Acceptance:
    """Accept a node when it is the target's most probable token after its parent."""
    return follow(tree, most_probable(scores))
