"""Medusa's rule: longer steps, another distribution."""

from typing import Annotated

import torch
from pydantic import Field

from drafthead.core.sampling import RowRandom, most_probable
from drafthead.core.settings import Number, settings
from drafthead.core.trees.tree import TokenTree
from drafthead.infer.verifiers.base import (
    Acceptance,
    at_parents,
    likeliest_deepest,
    path_to,
    register_verifier,
)


@settings
class Typical:
    """Lossy: Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1).

    A node x passes when target_probs(x) > min(epsilon, delta x exp(-H(target_probs))). The longest
    passing path wins, among equals the most probable; the bonus is the target's most probable
    token, at any temperature. So nothing but the answer's first token and steps without a tree is
    drawn. (The sampling option `typical_p` is something else: Meister's locally typical sampling.)
    """

    # The defaults of Medusa's code, which calls them posterior_threshold and posterior_alpha.
    typical_epsilon: Annotated[Number, Field(ge=0, le=1)] = 0.09
    typical_delta: Annotated[Number, Field(ge=0)] = 0.3

    def __call__(
        self,
        tree: TokenTree,
        scores: torch.Tensor,  # [B, N, V]
        random: RowRandom | None,
    ) -> Acceptance:
        """Accept the longest path of typical tokens; no random number is used."""
        entropy = -(scores * scores.clamp_min(1e-10).log()).sum(-1)  # [B, N]
        threshold = (self.typical_delta * torch.exp(-entropy)).clamp_max(self.typical_epsilon)
        own = at_parents(tree, scores).gather(2, tree.tokens.clamp_min(0)[..., None]).squeeze(2)
        passes = own > at_parents(tree, threshold)
        passes &= ~threshold.isnan()  # after which no token can be chosen
        node = likeliest_deepest(tree, passes, own.log())
        rows = torch.arange(node.shape[0], device=node.device)
        return path_to(tree, node, most_probable(scores[rows, node]))


register_verifier("typical", lossless=False, reads="probs")(Typical())
