"""The rule of temperature 0."""

import torch

from drafthead.heads.sampling import RowRandom
from drafthead.heads.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, deepest, path_to, register_verifier


@register_verifier("greedy", lossless=True, reads="logits", greedy=True)
def greedy(tree: TokenTree, scores: torch.Tensor, random: RowRandom | None) -> Acceptance:
    """Accept a node when it is the target's most probable token behind its parent."""
    best = scores.float().argmax(-1)  # [B, N]; a CPU searches 16-bit numbers four times slower
    passes = tree.tokens == best.gather(1, tree.parents.clamp_min(0))
    passes[:, 0] = True
    node = deepest(tree, passes)
    return path_to(tree, node, best.gather(1, node[:, None]).squeeze(1))
