"""Stern's top-k selection: longer steps, another text."""

from dataclasses import dataclass

import torch

from drafthead.contrib.lossy_rules.blockwise import Blockwise
from drafthead.heads.errors import UserError
from drafthead.heads.trees.tree import TokenTree
from drafthead.infer.verifiers.base import register_verifier


@dataclass(frozen=True)
class TopK(Blockwise):
    """Lossy: a drafted token stays when it is among the target's few most probable ones.

    Stern et al., 2018, arXiv 1811.03115, section 5.1. The text holds tokens that the target would
    not have chosen, and goes on from them. (The sampling option `top_k` is something else.)
    """

    accept_top: int = 2  # of the most probable tokens; 1 is `greedy`, 2 the mildest that is not

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accept_top < 1:
            raise UserError(f"accept_top must be at least 1, got {self.accept_top}")

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


register_verifier("top_k", lossless=False, reads="logits", greedy=True)(TopK())
