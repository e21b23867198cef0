"""Drafting with a recurrent head."""

import torch

from drafthead.heads.drafting.drafter import DraftSession
from drafthead.heads.families.head_drafter import register_drafter
from drafthead.heads.families.recurrent import RecurrentHead
from drafthead.heads.families.recurrent_passes import RecurrentPasses
from drafthead.heads.families.recurrent_session import RecurrentSession


@register_drafter(RecurrentHead)
class RecurrentDrafter(RecurrentPasses):
    """A recurrent head on dynamic trees, and on static ones where children are drawn.

    The static trees are the fixed one, or those grown from measured paths.
    """

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session for prompts [B, T]; their features come with the first commit."""
        return RecurrentSession(self, rows=len(lengths))
