"""Drafting with Medusa heads: static trees that one gather fills."""

from collections.abc import Callable
from functools import cached_property, partial

import torch

from drafthead.core.coupling import DRAWS, Choice, NextDraws
from drafthead.core.dims import Spec
from drafthead.core.drafting.drafter import Committed, DraftSession, OnDevice
from drafthead.core.sampling import (
    DRAFT_SUPPORT,
    RowRandom,
    Sampling,
    draft_distribution,
    draw_without_replacement,
)
from drafthead.core.target.target import Target
from drafthead.core.trees.recipe import Proposal, TokenFiller, TreeRecipe
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.heads.families.head_drafter import HeadDrafter, register_head_drafter
from drafthead.heads.families.medusa.head import MedusaHeads
from drafthead.heads.growing.levels import Guesses
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
    one gather makes the tokens: that is a graph of its own or, as a `TreeRecipe`, a part of the
    step's graph.
    """

    on_device = True

    def __init__(self, head: MedusaHeads, target: Target, shape: TreeShape | None):
        """Raises UserError when the tree is deeper than the number of heads."""
        super().__init__(head, target, shape)
        # The most children of a node.
        self.widest = min(MAX_RANK, self.num_guesses) if shape is None else shape.width
        self.layouts: dict[tuple[Budget, bool], MedusaLayout] = {}  # whether drawn
        self.guess: Callable[..., Guesses] = self._guess
        self.fill: Callable[..., torch.Tensor] = self._fill
        self.in_steps = False  # whether trees are filled in the graph of a step

    @cached_property
    def filler(self) -> TokenFiller:
        """Return what fills trees in the graph of a step."""
        # Uses all heads, so that one graph serves trees of any depth.
        return TokenFiller(
            partial(self._fill, depth=self.head.depth),
            dims=("B .", "B", "N", "N", DRAWS),
            reads=(*self.read_by_graphs, self.widest),
            alone=lambda *given: self.fill(*given, self.head.depth),
        )

    def _guess(
        self,
        hidden: torch.Tensor,  # [B, D] where the roots were predicted
        depth: int,  # d, of the tree that is to be filled
        count: int = DRAFT_SUPPORT,  # k
    ) -> Guesses:
        """Logits and ids [B, d, k] of the best guesses of the first d heads."""
        return self.best_guesses(self.head.all_logits(hidden, depth, self.target), count)

    def _fill(
        self,
        hidden: torch.Tensor,  # [B, D]
        roots: torch.Tensor,  # [B]
        head_of_node: torch.Tensor,  # [N]
        ranks: torch.Tensor,  # [N]
        draws: NextDraws | None,
        depth: int,
    ) -> torch.Tensor:
        """Tokens [B, N] of the tree: of each node the guess of its rank by its depth's head."""
        if draws is None:
            _, ids = self._guess(hidden, depth, self.widest)
        else:
            guesses = self._guess(hidden, depth)
            ids = guesses[1].gather(-1, draws.best(slice(depth), *guesses, self.widest)[1])
        is_root = torch.arange(ranks.shape[0], device=ranks.device) == 0
        return torch.where(is_root, roots[:, None], ids[:, head_of_node, ranks])

    def compile(self, target: Target | None = None) -> None:
        filling: dict[str, Spec] = {
            "hidden": "B .",
            "roots": "B",
            "head_of_node": "N",
            "ranks": "N",
            "draws": DRAWS,
        }
        self.prepare(target)
        self.guess = self.compiled(self._guess, {"hidden": "B ."}, self.widest)
        self.fill = self.compiled(self._fill, filling, self.widest)
        # Heads that share one output head cost as much whatever the depth of the tree.
        self.in_steps = self.head.config.output != "own"

    def layout(self, budget: Budget, random: Choice) -> MedusaLayout:
        """The tables of the tree for a budget; with a `RowRandom`, one of drawn children."""
        key = budget, isinstance(random, RowRandom)
        if key not in self.layouts:
            self.layouts[key] = MedusaLayout(self.shape(budget, random), self.target.device)
        return self.layouts[key]

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        self.follow_weights()
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
            logits, ids = drafter.guess(self.hidden, shape.depth)
            return self._drawn(layout, logits, ids, sampling, random)
        draws = None if random is None else random.padded(drafter.head.depth)
        arguments = self.hidden, self.roots, layout.head_of_node, layout.ranks, draws
        scores = drafter.scores(shape)
        if drafter.in_steps:
            rows = self.roots.shape[0]
            return TreeRecipe.from_shape(shape, rows, drafter.filler, arguments, scores)
        return TokenTree.from_shape(shape, drafter.fill(*arguments, shape.depth), scores=scores)

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
