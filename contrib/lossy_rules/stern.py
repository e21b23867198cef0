"""Stern's rules of blockwise parallel decoding: longer steps, another text (Stern et al., 2018).

The paper (arXiv 1811.03115) drafts a block with one head a depth, and accepts what greedy decoding
would have written, which is the rule `greedy` here. Its section 5 accepts more: drafted tokens that
are good enough stay as they are, and the token after them is the most probable one.
"""

from abc import ABC, abstractmethod

import torch

from drafthead.core.sampling import RowRandom, most_probable
from drafthead.core.settings import AtLeastOne, NotNegative, settings
from drafthead.core.trees.tree import TokenTree
from drafthead.infer.verifiers.base import (
    Acceptance,
    at_parents,
    likeliest_deepest,
    path_to,
    register_verifier,
)


@settings
class Blockwise(ABC):
    """A rule of temperature 0 that keeps drafted tokens which are good enough."""

    # Tokens that a step adds at least, the bonus included, as far as the draft has as many. The
    # drafted ones among them are not looked at; 1 looks at all. The paper's minimum block size.
    min_block: AtLeastOne = 1

    def __call__(
        self,
        tree: TokenTree,
        scores: torch.Tensor,  # [B, N, V] logits
        random: RowRandom | None,
    ) -> Acceptance:
        """Accept the longest path of good tokens; of several the most probable one."""
        best = most_probable(scores)  # [B, N] after each node
        before, best_before = at_parents(tree, scores.float()), at_parents(tree, best)
        good = self.is_good(tree, before, best_before) | (tree.depths < self.min_block)
        good &= best_before >= 0  # nothing follows a node where no token can be chosen
        # Such a node is where the text ends, so only the target's own choice leads there.
        good &= (best >= 0) | (tree.tokens == best_before)
        tokens = tree.tokens.clamp_min(0)[..., None]  # [B, N, 1]
        own = before.log_softmax(-1).gather(2, tokens).squeeze(2)
        good &= own > -torch.inf  # what a processor forbids is never written
        node = likeliest_deepest(tree, good, own)
        return path_to(tree, node, best.gather(1, node[:, None]).squeeze(1))

    @abstractmethod
    def is_good(
        self,
        tree: TokenTree,
        scores: torch.Tensor,  # [B, N, V] logits before each node, after its parent
        best: torch.Tensor,  # [B, N] the most probable token there
    ) -> torch.Tensor:
        """Which nodes are good enough [B, N]; what is said of the root and padding is ignored."""


@settings
class TopK(Blockwise):
    """Lossy: a drafted token stays when it is among the target's few most probable ones.

    Section 5.1 of the paper. The text holds tokens that the target would not have chosen, and goes
    on from them. (The sampling option `top_k` is something else.)
    """

    accept_top: AtLeastOne = 2  # of the most probable; 1 is `greedy`, 2 the mildest that is not

    def is_good(
        self,
        tree: TokenTree,
        scores: torch.Tensor,  # [B, N, V]
        best: torch.Tensor,  # [B, N]
    ) -> torch.Tensor:
        """The nodes [B, N] of which fewer than `accept_top` tokens are more probable.

        Of equal logits the lower token goes first, as in `greedy`.
        """
        token = tree.tokens.clamp_min(0)[..., None]  # [B, N, 1]
        own = scores.gather(2, token)
        lower = torch.arange(scores.shape[2], device=scores.device) < token
        before = (scores > own) | ((scores == own) & lower)
        return before.sum(-1) < self.accept_top


@settings
class Distance(Blockwise):
    """Lossy: a drafted token stays when its number is near that of the most probable one.

    Section 5.2 of the paper, for vocabularies whose numbers are an order, such as the intensities
    of pixels. In a vocabulary of text neighbours have nothing in common.
    """

    accept_distance: NotNegative = 2  # between the two numbers, at most; 0 is `greedy`

    def is_good(
        self,
        tree: TokenTree,
        scores: torch.Tensor,  # [B, N, V]
        best: torch.Tensor,  # [B, N]
    ) -> torch.Tensor:
        """The nodes [B, N] with |token - most probable token| <= `accept_distance`."""
        return (tree.tokens - best).abs() <= self.accept_distance


for _name, _rule in (("top_k", TopK()), ("distance", Distance())):
    register_verifier(_name, lossless=False, reads="logits", greedy=True)(_rule)
