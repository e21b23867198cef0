"""Rejection that favours the draft: longer steps, another distribution."""

from typing import Annotated

import torch
from pydantic import Field

from drafthead.core.sampling import RowRandom
from drafthead.core.settings import Number, settings
from drafthead.core.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, register_verifier
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
