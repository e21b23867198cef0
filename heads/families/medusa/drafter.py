"""Drafting with Medusa heads: static trees that one gather fills."""

import torch

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.drafting.drafter import Committed, DraftSession, OnDevice
from drafthead.core.sampling import (
    DRAFT_SUPPORT,
    RowRandom,
    Sampling,
    draft_distribution,
    draw_without_replacement,
)
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import Proposal
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.heads.families.head_drafter import HeadDrafter, register_head_drafter
from drafthead.heads.families.medusa.head import MedusaHeads
from drafthead.heads.growing.levels import Guess
from drafthead.heads.objectives.batch import MAX_RANK


class MedusaLayout:
    """A static tree as the index tables that fill it.

    A node of depth d is the `rank`-th guess of head d - 1. The root is counted to the first head
    and replaced, so that all tables are as long as the tree.
    """

    def __init__(self, shape: TreeShape, device: torch.device):
        self.shape = shape
        self.parents = shape.parents[1:].to(device)  # [N - 1]
        self.ranks = shape.ranks.to(device)  # [N]
        self.head_of_node = (shape.depths - 1).clamp_min(0).to(device)  # [N]
        # The head that guesses a node's children; leaves of full depth have none.
        self.head_of_children = shape.depths.clamp_max(max(shape.depth, 1) - 1).to(device)  # [N]


@register_head_drafter(MedusaHeads)
class MedusaDrafter(HeadDrafter[MedusaHeads]):
    """Medusa heads that fill static trees.

    The other families fill theirs level by level, with `growing.levels.filled_tree`. Medusa's heads
    do not read the tokens drafted before theirs, so all guesses exist before the tree is filled and
    one gather makes the tokens.
    """

    def __init__(self, head: MedusaHeads, target: Target, shape: TreeShape | None):
        """Raises UserError when the tree is deeper than the number of heads."""
        super().__init__(head, target, shape)
        # The most children of a node.
        self.widest = min(MAX_RANK, self.num_guesses) if shape is None else shape.width
        self.layouts: dict[tuple[Budget, bool], MedusaLayout] = {}  # whether drawn

    def guesses(
        self,
        hidden: torch.Tensor,  # [B, D] where the roots were predicted
        depth: int,  # d, of the tree that is to be filled
        count: int = DRAFT_SUPPORT,  # k
    ) -> Guess:
        """The best guesses [B, d, k] of the first d heads."""
        return self.guess(hidden[:, None], self.head.all_logits(hidden, depth, self.target), count)

    def fill(
        self,
        depth: int,
        hidden: torch.Tensor,  # [B, D]
        roots: torch.Tensor,  # [B]
        head_of_node: torch.Tensor,  # [N]
        ranks: torch.Tensor,  # [N]
        draws: NextDraws | None,
    ) -> torch.Tensor:
        """Tokens [B, N] of the tree: of each node the guess of its rank by its depth's head."""
        if draws is None:
            ids = self.guesses(hidden, depth, self.widest).ids
        else:
            guess = self.guesses(hidden, depth)
            places = draws.best(slice(depth), guess.logits, guess.ids, self.widest)[1]
            ids = guess.ids.gather(-1, places)
        is_root = torch.arange(ranks.shape[0], device=ranks.device) == 0
        return torch.where(is_root, roots[:, None], ids[:, head_of_node, ranks])

    def layout(self, budget: Budget, random: Choice) -> MedusaLayout:
        """The tables of the tree for a budget; with a `RowRandom`, one of drawn children."""
        key = budget, isinstance(random, RowRandom)
        if key not in self.layouts:
            self.layouts[key] = MedusaLayout(self.shape(budget, random), self.target.device)
        return self.layouts[key]

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
        layout = self.drafter.layout(budget, random)
        shape, drafter = layout.shape, self.drafter
        if isinstance(random, RowRandom):
            guess = drafter.whole(drafter.guesses)(self.hidden, shape.depth)
            return self._drawn(layout, guess.logits, guess.ids, sampling, random)
        draws = None if random is None else random.padded(drafter.head.depth)
        arguments = self.hidden, self.roots, layout.head_of_node, layout.ranks, draws
        tokens = drafter.whole(drafter.fill)(shape.depth, *arguments)
        return TokenTree.from_shape(shape, tokens, scores=drafter.scores(shape))

    def _drawn(
        self,
        layout: MedusaLayout,
        logits: torch.Tensor,  # [B, d, k]
        ids: torch.Tensor,  # [B, d, k]
        sampling: Sampling,
        random: RowRandom,
    ) -> TokenTree:
        """Children drawn without replacement, independently under each parent."""
        assert self.roots is not None
        probs = draft_distribution(logits, sampling)  # [B, d, k]
        draft_ids = ids[:, layout.head_of_children]  # [B, N, k]
        draft_probs = probs[:, layout.head_of_children]
        uniform = random.uniform(*draft_probs.shape[1:])
        order = draw_without_replacement(draft_probs, layout.shape.width, uniform)
        drawn = draft_ids.gather(-1, order)  # [B, N, width]
        children = drawn[:, layout.parents, layout.ranks[1:]]  # [B, N - 1]
        tokens = torch.cat([self.roots[:, None], children], dim=1)
        return TokenTree.from_shape(layout.shape, tokens, draft_ids, draft_probs)
