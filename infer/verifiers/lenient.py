"""Rejection that favours the draft: longer steps, another distribution."""

import torch

from drafthead.heads.sampling import RowRandom
from drafthead.heads.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, register_verifier
from drafthead.infer.verifiers.rejection import reject_recursively

# After any prefix no token becomes more than 1 / LENIENCE times as probable as it should be.
LENIENCE = 0.5


@register_verifier("lenient", lossless=False, reads="probs", draws_children=True)
def lenient(
    tree: TokenTree,
    scores: torch.Tensor,  # [B, N, V]
    random: RowRandom | None,
) -> Acceptance:
    """Lossy: as `rejection`, but child x passes with min(1, target(x) / (LENIENCE x draft(x))).

    Leviathan et al., 2023, arXiv 2211.17192, appendix A.5. Children that were not drawn have no
    draft probability; they are matched, which is exact.
    """
    return reject_recursively(tree, scores, random, LENIENCE)
