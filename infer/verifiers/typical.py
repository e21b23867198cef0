"""Medusa's rule: longer steps, another distribution."""

import torch

from drafthead.heads.sampling import RowRandom, sample
from drafthead.heads.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, deepest, path_to, register_verifier

# A token passes above min(EPSILON, DELTA x exp(-entropy)).
TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


@register_verifier("typical", lossless=False, reads="probs")
def typical_acceptance(
    tree: TokenTree,
    scores: torch.Tensor,  # [B, N, V]
    random: RowRandom | None,
) -> Acceptance:
    """Lossy: Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1).

    A node x passes when target_probs(x) > min(epsilon, delta x exp(-H(target_probs))). The longest
    passing path wins, among equals the most probable; the bonus is drawn from the target. (The
    sampling option `typical_p` is something else: Meister's locally typical sampling.)
    """
    assert random is not None
    entropy = -(scores * scores.clamp_min(1e-10).log()).sum(-1)  # [B, N]
    threshold = (TYPICAL_DELTA * torch.exp(-entropy)).clamp_max(TYPICAL_EPSILON)
    parents = tree.parents.clamp_min(0)
    token_probs = scores.gather(1, parents[..., None].expand_as(scores))
    token_probs = token_probs.gather(2, tree.tokens.clamp_min(0)[..., None]).squeeze(2)  # [B, N]
    passes = (token_probs > threshold.gather(1, parents)) & (tree.tokens >= 0)
    passes[:, 0] = token_probs[:, 0] = 1
    path_log_probs = (token_probs.clamp_min(1e-10).log()[:, None] * tree.ancestors).sum(-1)
    # The log maps to (0, 1). The path's probability itself could be too small to be compared.
    node = deepest(tree, passes, 0.999 / (1 - path_log_probs))
    rows = torch.arange(node.shape[0], device=node.device)
    return path_to(tree, node, sample(scores[rows, node], random.uniform()))
