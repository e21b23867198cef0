"""Stern's distance-based selection: longer steps, other values."""

from dataclasses import dataclass

import torch

from drafthead.contrib.lossy_rules.blockwise import Blockwise
from drafthead.heads.errors import UserError
from drafthead.heads.trees.tree import TokenTree
from drafthead.infer.verifiers.base import register_verifier


@dataclass(frozen=True)
class Distance(Blockwise):
    """Lossy: a drafted token stays when its number is near that of the most probable one.

    Stern et al., 2018, arXiv 1811.03115, section 5.2, for vocabularies whose numbers are an order,
    such as the intensities of pixels. In a vocabulary of text neighbours have nothing in common.
    """

    accept_distance: int = 2  # between the two numbers, at most; 0 is `greedy`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accept_distance < 0:
            raise UserError(f"accept_distance must be 0 or above, got {self.accept_distance}")

    def is_good(
        self,
        tree: TokenTree,
        scores: torch.Tensor,  # [B, N, V]
        best: torch.Tensor,  # [B, N]
    ) -> torch.Tensor:
        """The nodes [B, N] with |token - most probable token| <= `accept_distance`."""
        return (tree.tokens - best).abs() <= self.accept_distance


register_verifier("distance", lossless=False, reads="logits", greedy=True)(Distance())
