"""Drafting with Medusa heads: static trees whose guesses all exist before they are filled."""

import torch

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.drafting.drafter import Committed, DraftSession, OnDevice
from drafthead.core.sampling import DRAFT_SUPPORT, RowRandom, Sampling, SamplingConfig
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import Proposal
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.heads.families.head_drafter import HeadDrafter, register_head_drafter
from drafthead.heads.families.medusa.head import MedusaHeads
from drafthead.heads.growing.levels import Guess, blind, filled_levels
from drafthead.heads.objectives.batch import MAX_RANK


@register_head_drafter(MedusaHeads)
class MedusaDrafter(HeadDrafter[MedusaHeads]):
    """Medusa heads that fill static trees."""

    def __init__(self, head: MedusaHeads, target: Target, shape: TreeShape | None):
        """Raises UserError when the tree is deeper than the number of heads."""
        super().__init__(head, target, shape)
        # The most children of a node.
        self.widest = min(MAX_RANK, self.num_guesses) if shape is None else shape.width

    def guesses(
        self,
        hidden: torch.Tensor,  # [B, D] where the roots were predicted
        depth: int,  # d, of the tree that is to be filled
        count: int = DRAFT_SUPPORT,  # k
    ) -> Guess:
        """The best guesses [B, d, k] of the first d heads."""
        logits = self.head.all_logits(hidden, depth, self.target)
        return self.guess(logits[..., :0], logits, count)

    def fill(
        self,
        hidden: torch.Tensor,  # [B, D]
        roots: torch.Tensor,  # [B]
        draws: NextDraws | None,
        budget: Budget,
    ) -> torch.Tensor:
        """Tokens [B, N] of the tree for a budget, in one call."""
        shape = self.shape(budget, draws)
        count = self.widest if draws is None else DRAFT_SUPPORT
        guess = self.guesses(hidden, shape.depth, count)
        given = self.levels(shape), roots, guess.states, blind(guess)
        return filled_levels(*given, SamplingConfig(), draws)[0]

    def session(self, rows: int) -> DraftSession:
        return MedusaSession(self)


class MedusaSession(OnDevice):
    """Medusa heads at work: the state is one hidden state for each row."""

    row_state = ("hidden", "roots")

    def __init__(self, drafter: MedusaDrafter):
        self.drafter = drafter
        self.hidden: torch.Tensor | None = None  # [B, D], where the root was predicted
        self.roots: torch.Tensor | None = None  # [B]

    def commit(self, committed: Committed) -> None:
        self.roots, self.hidden = committed.ends

    @torch.no_grad()
    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> Proposal:
        assert self.hidden is not None and self.roots is not None
        drafter = self.drafter
        shape = drafter.shape(budget, random)
        if isinstance(random, RowRandom):
            guess = drafter.whole(drafter.guesses)(self.hidden, shape.depth)
            given = self.roots, guess.states, blind(guess)
            return drafter.filled(budget, *given, sampling, random)
        drafter.levels(shape)  # are there before a recording reads them
        draws = None if random is None else random.padded(drafter.head.depth)
        tokens = drafter.whole(drafter.fill)(self.hidden, self.roots, draws, budget)
        return TokenTree.from_shape(shape, tokens, scores=drafter.scores(shape))
