"""Drafting with a block-parallel head: its context, its candidates, and the trees of them."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from drafthead.heads.base import Committed, Drafter, DraftSession
from drafthead.heads.best_first import best_first_tree, filled_tree
from drafthead.heads.draft_layers import DraftCache, Store
from drafthead.heads.errors import UserError
from drafthead.heads.sampling import RowRandom, SamplingConfig
from drafthead.heads.sequential import Level, levels_of
from drafthead.heads.target import Target
from drafthead.heads.tree import Budget, StaticTrees, TokenTree, TreeShape, tree_budgets

if TYPE_CHECKING:
    from drafthead.heads.parallel import ParallelHead

# Tokens of each depth that a tree chooses from; drawn children are drawn from these alone, which
# leaves the verification exact.
CANDIDATES = 16


class ParallelDrafter(Drafter):
    """A block-parallel head on its most probable trees, or on static ones."""

    def __init__(self, head: "ParallelHead", target: Target, shape: TreeShape | None):
        """Raises UserError when the tree is deeper than the block."""
        if shape is not None and shape.depth > head.depth:
            raise UserError(
                f"a token tree of depth {shape.depth} does not fit a {head.family} head that "
                f"drafts {head.depth} tokens"
            )
        self.head, self.target, self.fixed = head, target, shape
        self.features = head.features_needed
        self.trees = StaticTrees(head.path_counts, head.depth, shape)
        self.budgets = self.trees.budgets if shape is not None else tree_budgets(head.depth)
        self.known_levels: dict[TreeShape, list[Level]] = {}

    def levels(self, shape: TreeShape) -> list[Level]:
        """The levels of a static tree, made once for each shape."""
        if shape not in self.known_levels:
            self.known_levels[shape] = levels_of(shape, self.target.device)
        return self.known_levels[shape]

    def chances(self, budget: Budget) -> tuple[float, ...]:
        """As measured after training for the best static tree, which these trees outdo."""
        return self.trees.chances(budget) or super().chances(budget)

    def identity(self) -> str:
        """The shape of the head, and of a fixed tree."""
        return repr((self.head.config, self.fixed))

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session; the prompt's features come with the first commit."""
        return ParallelSession(self)


class ParallelSession(DraftSession):
    """A block-parallel head at work: the state is the context's keys and values."""

    def __init__(self, drafter: ParallelDrafter):
        self.drafter = drafter
        self.cache = DraftCache(drafter.head.config.num_layers)
        self.roots: torch.Tensor | None = None  # [B]
        self.before: torch.Tensor | None = None  # [B, D], fused features before the roots

    @torch.no_grad()
    def commit(self, committed: Committed) -> None:
        """Add what was committed to the context and keep the root."""
        tokens, lengths = committed.tokens, committed.lengths
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if self.cache.lengths is not None:
            positions = positions + self.cache.lengths[:, None]
        transformer = self.drafter.head.transformer
        fused = transformer.fused(committed.features)
        context = transformer.context(fused, positions)
        for layer, (keys, values) in enumerate(context):
            self.cache.append(layer, keys, values)
        self.cache.stay(tokens.shape[1])
        self.cache.commit(lengths)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        self.roots = tokens[rows, lengths - 1]
        self.before = fused[rows, lengths - 1]

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop the state of all other rows."""
        assert self.roots is not None and self.before is not None
        self.cache.keep_rows(rows)
        self.roots, self.before = self.roots[rows], self.before[rows]

    @torch.no_grad()
    def propose(
        self, budget: Budget, sampling: SamplingConfig, random: RowRandom | None
    ) -> TokenTree:
        """One pass over the block, then a tree from its candidates."""
        assert self.roots is not None
        drafter = self.drafter
        scorer = BlockScorer(drafter.head, drafter.target, self.drafted(), self.roots)
        if random is None and drafter.fixed is None:
            return best_first_tree(self.roots, scorer, budget)
        shape = drafter.trees.shape(budget)
        levels = drafter.levels(shape)
        return filled_tree(self.roots, scorer, shape, levels, sampling, random)

    def drafted(self) -> torch.Tensor:
        """Hidden states [B, K, D] of the block behind the roots."""
        assert self.roots is not None and self.before is not None
        assert self.cache.lengths is not None
        transformer = self.drafter.head.transformer
        mask = self.cache.mask(transformer.visible(1, self.roots.device)[None])
        stores: list[Store] = [
            partial(self.cache.append, layer) for layer in range(len(transformer.layers))
        ]
        roots, positions = self.roots[:, None], self.cache.lengths[:, None]
        before = self.before[:, None]
        return transformer(self.drafter.target, roots, before, positions, mask, stores)[:, 0]


class BlockScorer:
    """The candidates of a drafted block, scored by the real tokens before them.

    See `best_first.Scorer`.
    """

    def __init__(
        self,
        head: "ParallelHead",
        target: Target,
        hidden: torch.Tensor,  # [B, K, D] of the block's slots
        roots: torch.Tensor,  # [B]
    ):
        self.correction, self.hidden = head.correction, hidden
        logits = head.base_logits(hidden, target).float()
        guesses = self._likely(logits, head, roots)  # [B, K, k]
        self.candidates = head.tokens_of(guesses)
        self.logits = logits.gather(-1, guesses)
        if self.correction is not None:
            # In float32: a CPU multiplies small 16-bit matrices many times slower.
            self.outputs = self.correction.output.weight[guesses].float().mT  # [B, K, rank, k]

    def _likely(
        self, logits: torch.Tensor, head: "ParallelHead", roots: torch.Tensor
    ) -> torch.Tensor:
        """The guesses [B, K, k] that logits [B, K, V] and the average correction favour.

        Without its correction a slot does not know what it follows. The average is taken over the
        candidates of the slot before, weighted by how probable they are.
        """
        count = min(CANDIDATES, logits.shape[-1])
        if self.correction is None:
            return logits.topk(count, dim=-1).indices
        before, state = roots[:, None], self.begin(roots)
        weights = torch.ones_like(before, dtype=logits.dtype)[..., None]  # [B, F, 1]
        guesses = []
        for depth in range(logits.shape[1]):
            codes, states = self._step(depth, before, state.expand(-1, before.shape[1], -1))
            code = (weights.to(codes.dtype) * codes).sum(dim=1)
            state = (weights.to(states.dtype) * states).sum(dim=1, keepdim=True)
            best = (logits[:, depth] + self.correction.output(code)).topk(count, dim=-1)
            guesses.append(best.indices)
            before, weights = head.tokens_of(best.indices), best.values.softmax(-1)[..., None]
        return torch.stack(guesses, dim=1)

    def begin(self, roots: torch.Tensor) -> torch.Tensor:
        """The state [B, 1, R] in front of the roots [B]."""
        first = self.hidden[:, :1]
        return first[..., :0] if self.correction is None else self.correction.begin(first)

    def log_probs(
        self, depth: int, parents: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [B, F, k] of a depth's candidates behind parents [B, F]."""
        logits = self.logits[:, depth, None]
        if self.correction is not None:
            codes, state = self._step(depth, parents, state)
            logits = logits + codes.float() @ self.outputs[:, depth]
        return logits.log_softmax(-1).expand(-1, parents.shape[1], -1), state

    def _step(
        self, depth: int, before: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [B, F, rank] of a slot behind tokens [B, F], and the states behind them."""
        assert self.correction is not None
        hidden = self.hidden[:, depth, None].expand(-1, before.shape[1], -1)
        return self.correction.step(before, hidden, state)
