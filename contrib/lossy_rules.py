"""Acceptance rules whose text is not the target's own: longer steps, another distribution."""

from typing import Annotated

import torch
from pydantic import Field

from drafthead.core.sampling import RowRandom, most_probable
from drafthead.core.settings import AtLeastOne, Number, settings
from drafthead.core.trees.tree import TokenTree
from drafthead.infer.verifiers.base import (
    Acceptance,
    at_parents,
    likeliest_deepest,
    path_to,
    register_verifier,
)
from drafthead.infer.verifiers.rejection import reject_recursively


@settings
class Lenient:
    """Lossy: as `rejection`, but child x passes with min(1, target(x) / (lenience x draft(x))).

    Leviathan et al., 2023, arXiv 2211.17192, appendix A.5. Children that were not drawn have no
    draft probability; they are matched, which is exact.
    """

    # After any prefix no token becomes more than 1 / lenience times as probable as it should be; 1
    # is `rejection`.
    lenience: Annotated[Number, Field(gt=0, le=1)] = 0.5

    def __call__(
        self,
        tree: TokenTree,
        scores: torch.Tensor,  # [B, N, V]
        random: RowRandom | None,
    ) -> Acceptance:
        """Accept a path of the tree."""
        return reject_recursively(tree, scores, random, self.lenience)


register_verifier("lenient", lossless=False, reads="probs", draws_children=True)(Lenient())


@settings
class TopK:
    """Lossy: a drafted token stays when it is among the target's few most probable ones.

    For temperature 0 (Stern et al., 2018, Blockwise parallel decoding, arXiv 1811.03115, section
    5.1; the paper's own rule is `greedy` here). The text holds tokens that the target would not
    have chosen, and goes on from them. (The sampling option `top_k` is something else.)
    """

    # Tokens that a step adds at least, the bonus included, as far as the draft has as many. The
    # drafted ones among them are not looked at; 1 looks at all. The paper's minimum block size.
    min_block: AtLeastOne = 1
    accept_top: AtLeastOne = 2  # of the most probable; 1 is `greedy`, 2 the mildest that is not

    def __call__(
        self,
        tree: TokenTree,
        scores: torch.Tensor,  # [B, N, V] logits
        random: RowRandom | None,
    ) -> Acceptance:
        """Accept the longest path of good tokens; of several the most probable one."""
        best = most_probable(scores)  # [B, N] after each node
        before, best_before = at_parents(tree, scores.float()), at_parents(tree, best)
        token = tree.tokens.clamp_min(0)[..., None]  # [B, N, 1]
        own = before.gather(2, token)
        # Of equal logits the lower token goes first, as in `greedy`.
        lower = torch.arange(before.shape[2], device=before.device) < token
        better = ((before > own) | ((before == own) & lower)).sum(-1)  # [B, N] more probable ones
        good = (better < self.accept_top) | (tree.depths < self.min_block)
        good &= best_before >= 0  # nothing follows a node where no token can be chosen
        # Such a node is where the text ends, so only the target's own choice leads there.
        good &= (best >= 0) | (tree.tokens == best_before)
        log_probs = before.log_softmax(-1).gather(2, token).squeeze(2)
        good &= log_probs > -torch.inf  # what a processor forbids is never written
        return longest(tree, scores, good, log_probs)


register_verifier("top_k", lossless=False, reads="logits", greedy=True)(TopK())


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
        return longest(tree, scores, passes, own.log())


register_verifier("typical", lossless=False, reads="probs")(Typical())


def longest(
    tree: TokenTree,
    scores: torch.Tensor,  # [B, N, V]
    passes: torch.Tensor,  # [B, N]
    log_probs: torch.Tensor,  # [B, N] of the nodes' tokens
) -> Acceptance:
    """Accept the longest path that passes, then the target's most probable token."""
    node = likeliest_deepest(tree, passes, log_probs)
    rows = torch.arange(node.shape[0], device=node.device)
    return path_to(tree, node, most_probable(scores[rows, node]))
