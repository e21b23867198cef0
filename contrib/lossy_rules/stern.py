"""A rule of blockwise parallel decoding: longer steps, another text (Stern et al., 2018).

The paper (arXiv 1811.03115) drafts a block with one head a depth, and accepts what greedy decoding
would have written, which is the rule `greedy` here. Its section 5 accepts more: drafted tokens that
are good enough stay as they are, and the token after them is the most probable one.
"""

import torch

from drafthead.core.sampling import RowRandom, most_probable
from drafthead.core.settings import AtLeastOne, settings
from drafthead.core.trees.tree import TokenTree
from drafthead.infer.verifiers.base import (
    Acceptance,
    at_parents,
    likeliest_deepest,
    path_to,
    register_verifier,
)


@settings
class TopK:
    """Lossy: a drafted token stays when it is among the target's few most probable ones.

    Section 5.1 of the paper, for temperature 0. The text holds tokens that the target would not
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
        node = likeliest_deepest(tree, good, log_probs)
        return path_to(tree, node, best.gather(1, node[:, None]).squeeze(1))


register_verifier("top_k", lossless=False, reads="logits", greedy=True)(TopK())
