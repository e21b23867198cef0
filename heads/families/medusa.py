"""Medusa (Cai et al., 2024, arXiv 2401.10774): K independent heads on the last hidden state.

Where the target's own output head guesses the next token, head k guesses the k-th token after it:
residual blocks x + SiLU(W x + b) on the target's final hidden state, then an output projection.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
from torch import nn
from torch.nn.functional import silu

from drafthead.heads.base import MAX_RANK, HeadBatch, register_head
from drafthead.heads.drafting.drafter import Committed, DraftSession
from drafthead.heads.families.head_drafter import HeadDrafter, register_drafter
from drafthead.heads.graphs.compiled import Compiled
from drafthead.heads.objectives.anchors import AnchoredHead
from drafthead.heads.objectives.losses import check_depth_decay, check_token_loss
from drafthead.heads.sampling import (
    DRAFT_SUPPORT,
    RowRandom,
    SamplingConfig,
    draw_without_replacement,
    probabilities,
)
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.target.target import Target
from drafthead.heads.trees.levels import Guesses, best_guesses
from drafthead.heads.trees.recipe import TokenFiller, TreeRecipe
from drafthead.heads.trees.tree import Budget, TokenTree, TreeShape


@dataclass(frozen=True)
class MedusaConfig:
    """Shape and loss of Medusa heads. Sizes are filled in from the target."""

    num_heads: int = 4
    num_blocks: int = 1
    output: Literal["own", "shared"] = "own"  # shared: the target's frozen output head
    bias: bool = True  # in the residual blocks
    loss: str = "hard"  # a name in heads.losses.TOKEN_LOSSES
    depth_decay: float = 0.8  # head k's loss is weighted by depth_decay ** (k - 1)
    hidden_size: int = 0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_blocks < 1:
            raise ValueError("num_heads and num_blocks must be at least 1")
        check_token_loss(self.loss)
        check_depth_decay(self.depth_decay)


class MedusaBranch(nn.Module):
    """One head: residual blocks and, unless it is shared, the projection to the vocabulary."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        size = config.hidden_size
        blocks = [nn.Linear(size, size, bias=config.bias) for _ in range(config.num_blocks)]
        for parameter in nn.ModuleList(blocks).parameters():
            # With zero blocks a fresh head says exactly what the target's output head says.
            nn.init.zeros_(parameter)
        self.blocks = nn.ModuleList(blocks)
        self.output = (
            nn.Linear(size, config.vocab_size, bias=False) if config.output == "own" else None
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The block outputs [..., D] that the projection reads."""
        for block in self.blocks:
            hidden = hidden + silu(block(hidden))
        return hidden


@register_head("medusa", MedusaConfig)
class MedusaHeads(AnchoredHead):
    """K Medusa heads."""

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.branches = nn.ModuleList(MedusaBranch(config) for _ in range(config.num_heads))

    @property
    def features_needed(self) -> FeatureSpec:
        """The hidden state after the final norm."""
        return FeatureSpec(layers=(), last=True)

    @property
    def depth(self) -> int:
        """One token for each head."""
        return len(self.branches)

    def initialize(self, target: Target) -> None:
        """Copy the target's output head into each head's own projection."""
        weight = target.output_weight()
        for index in range(self.depth):
            output = self.branch(index).output
            if output is not None:
                output.weight.data.copy_(weight)

    def branch(self, index: int) -> MedusaBranch:
        """Head `index`, which guesses the token index + 1 places behind the root."""
        return cast(MedusaBranch, self.branches[index])

    def logits(self, state: torch.Tensor, index: int, target: Target) -> torch.Tensor:
        """Logits [..., V] of head `index`, for the token index + 2 places after state [..., D]."""
        branch = self.branch(index)
        hidden = branch(state)
        if branch.output is None:
            return target.project(hidden)
        return target.finish_logits(branch.output(hidden))

    def all_logits(self, state: torch.Tensor, depth: int, target: Target) -> torch.Tensor:
        """Logits [B, d, V] of the first d heads behind one state [B, D] a row.

        Heads that share the target's output head go through it together, so that it is read once.
        """
        if self.config.output == "own":
            return torch.stack([self.logits(state, k, target) for k in range(depth)], dim=1)
        hidden = torch.stack([self.branch(k)(state) for k in range(depth)], dim=1)
        return target.project(hidden)

    def states(
        self, batch: HeadBatch, rows: torch.Tensor, anchors: torch.Tensor, target: Target
    ) -> Iterable[torch.Tensor]:
        """The anchors' hidden states [A, D], the same for every head."""
        assert batch.features.last is not None
        return [batch.features.last[rows, anchors]] * self.depth


class MedusaLayout:
    """A static tree as the index tables that fill it.

    A node of depth d is the `rank`-th guess of head d - 1 under its parent. The root is counted to
    the first head and replaced, so that all tables are as long as the tree.
    """

    def __init__(self, shape: TreeShape, device: torch.device):
        self.shape = shape
        self.parents = shape.parents[1:].to(device)  # [N - 1]
        self.ranks = shape.ranks.to(device)  # [N]
        self.head_of_node = (shape.depths - 1).clamp_min(0).to(device)  # [N]
        # Under which head's distribution a node's children stand; leaves of full depth have none.
        self.head_of_children = shape.depths.clamp_max(max(shape.depth, 1) - 1).to(device)  # [N]


@register_drafter(MedusaHeads)
class MedusaDrafter(HeadDrafter[MedusaHeads]):
    """Medusa heads that fill static trees."""

    def __init__(self, head: MedusaHeads, target: Target, shape: TreeShape | None):
        """Raises UserError when the tree is deeper than the number of heads."""
        super().__init__(head, target, shape)
        self.widest = MAX_RANK if shape is None else shape.width  # guesses looked at for a node
        self.layouts: dict[tuple[Budget, bool], MedusaLayout] = {}
        # By all heads, so that one graph serves trees of any depth.
        fill_with_all = partial(self._fill, depth=head.depth)
        self.filler = TokenFiller(fill_with_all, rows=((0, 0), (1, 0)), nodes=((2, 0), (3, 0)))
        self.guess: Callable[..., Guesses] = self._guess
        self.fill: Callable[..., torch.Tensor] = self._fill

    def _guess(
        self,
        hidden: torch.Tensor,  # [B, D] where the roots were predicted
        depth: int,  # d, of the tree that is to be filled
        count: int = DRAFT_SUPPORT,  # k
    ) -> Guesses:
        """Logits and ids [B, d, k] of the first heads' best guesses behind the roots."""
        return best_guesses(self.head.all_logits(hidden, depth, self.target), count=count)

    def _fill(
        self,
        hidden: torch.Tensor,  # [B, D]
        roots: torch.Tensor,  # [B]
        head_of_node: torch.Tensor,  # [N]
        ranks: torch.Tensor,  # [N]
        depth: int,
    ) -> torch.Tensor:
        """Tokens [B, N] of the tree: each node the guess of its rank of its depth's head."""
        _, ids = self._guess(hidden, depth, self.widest)
        is_root = torch.arange(ranks.shape[0], device=ranks.device) == 0
        return torch.where(is_root, roots[:, None], ids[:, head_of_node, ranks])

    def compile(self) -> None:
        """Compile the heads, a graph for each number of heads that a tree needs."""
        self.guess = Compiled(
            self._guess,
            self.target.device,
            self.target.dtype,
            kind=lambda hidden, depth: (hidden.shape[0] == 1, depth),
            sizes=lambda hidden, depth: [[(hidden, 0)]],
        )
        self.fill = Compiled(
            self._fill,
            self.target.device,
            self.target.dtype,
            kind=lambda hidden, roots, heads, ranks, depth: (hidden.shape[0] == 1, depth),
            sizes=lambda hidden, roots, heads, ranks, depth: [
                [(hidden, 0), (roots, 0)],
                [(heads, 0), (ranks, 0)],
            ],
        )

    def layout(self, budget: Budget, drawn: bool) -> MedusaLayout:
        """The tables of the tree for a budget, of the best guesses or of drawn ones."""
        if (budget, drawn) not in self.layouts:
            shape = self.trees.shape(budget)
            shape = shape.gapless if drawn else shape
            self.layouts[budget, drawn] = MedusaLayout(shape, self.target.device)
        return self.layouts[budget, drawn]

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session; the prompt itself is not needed, its features come with the first commit."""
        return MedusaSession(self)


class MedusaSession(DraftSession):
    """Medusa heads at work: the state is one hidden state a row."""

    def __init__(self, drafter: MedusaDrafter):
        self.drafter = drafter
        self.hidden: torch.Tensor | None = None  # [B, D], where the root was predicted
        self.roots: torch.Tensor | None = None  # [B]

    def commit(self, committed: Committed) -> None:
        """Keep the root and the hidden state that predicted it."""
        self.roots, self.hidden = committed.ends

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop the state of all other rows."""
        assert self.hidden is not None and self.roots is not None
        self.hidden, self.roots = self.hidden[rows], self.roots[rows]

    @torch.no_grad()
    def propose(
        self, budget: Budget, sampling: SamplingConfig, random: RowRandom | None
    ) -> TokenTree:
        """Fill the tree with the heads' best guesses, or with guesses drawn from the heads."""
        assert self.hidden is not None and self.roots is not None
        layout = self.drafter.layout(budget, drawn=random is not None)
        depth = layout.shape.depth
        if random is not None:
            logits, ids = self.drafter.guess(self.hidden, depth)
            return self._drawn(layout, logits, ids, sampling, random)
        tables = layout.head_of_node, layout.ranks
        tokens = self.drafter.fill(self.hidden, self.roots, *tables, depth)
        return TokenTree.from_shape(layout.shape, tokens)

    def recipe(self, budget: Budget) -> TreeRecipe | None:
        """For heads with one output head, which cost the same whatever the depth of the tree."""
        if self.drafter.head.config.output == "own":
            return None
        assert self.hidden is not None and self.roots is not None
        layout = self.drafter.layout(budget, drawn=False)
        arguments = self.hidden, self.roots, layout.head_of_node, layout.ranks
        rows = self.roots.shape[0]
        return TreeRecipe.from_shape(layout.shape, rows, self.drafter.filler, arguments)

    def _drawn(
        self,
        layout: MedusaLayout,
        logits: torch.Tensor,  # [B, d, k]
        ids: torch.Tensor,  # [B, d, k]
        sampling: SamplingConfig,
        random: RowRandom,
    ) -> TokenTree:
        """Children drawn without replacement, anew under each parent."""
        assert self.roots is not None
        probs = probabilities(logits, sampling)  # [B, d, k]
        draft_ids = ids[:, layout.head_of_children]  # [B, N, k]
        draft_probs = probs[:, layout.head_of_children]
        uniform = random.uniform(*draft_probs.shape[1:])
        order = draw_without_replacement(draft_probs, layout.shape.width, uniform)
        drawn = draft_ids.gather(-1, order)  # [B, N, width]
        drafted = drawn[:, layout.parents, layout.ranks[1:]]  # [B, N - 1]
        tokens = torch.cat([self.roots[:, None], drafted], dim=1)
        return TokenTree.from_shape(layout.shape, tokens, draft_ids, draft_probs)
