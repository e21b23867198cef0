"""Blockwise parallel decoding: what its lossy rules have in common (Stern et al., 2018).

The paper (arXiv 1811.03115) drafts a block with one head a depth, and accepts what greedy decoding
would have written, which is the rule `greedy` here. Its section 5 accepts more: drafted tokens that
are good enough stay as they are, and the token after them is the most probable one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from drafthead.heads.errors import UserError
from drafthead.heads.sampling import RowRandom, most_probable
from drafthead.heads.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, at_parents, likeliest_deepest, path_to


@dataclass(frozen=True)
class Blockwise(ABC):
    """A rule of temperature 0 that keeps drafted tokens which are good enough."""

    # Tokens that a step adds at least, the bonus included, as far as the draft has as many. The
    # drafted ones among them are not looked at; 1 looks at all. The paper's minimum block size.
    min_block: int = 1

    def __post_init__(self) -> None:
        if self.min_block < 1:
            raise UserError(f"min_block must be at least 1, got {self.min_block}")

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
        tokens = tree.tokens.clamp_min(0)[..., None]  # [B, N, 1]
        own = before.log_softmax(-1).gather(2, tokens).squeeze(2)
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
