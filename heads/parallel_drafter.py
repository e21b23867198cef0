"""Drafting with a block-parallel head: its context, its candidates, and the trees of them."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from drafthead.heads.base import Committed, Drafter, DraftSession
from drafthead.heads.best_first import best_first_tree
from drafthead.heads.draft_layers import DraftCache, Store
from drafthead.heads.errors import UserError
from drafthead.heads.sampling import RowRandom, SamplingConfig
from drafthead.heads.sequential import Level, Support, drawn, for_all_nodes, levels_of
from drafthead.heads.target import Target
from drafthead.heads.tree import Budget, StaticTrees, TokenTree, TreeShape, tree_budgets

if TYPE_CHECKING:
    from drafthead.heads.parallel import ParallelHead

CANDIDATES = 16  # tokens of each depth that a best-first tree chooses from


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
        """One pass over the block, then a tree of what it says."""
        assert self.roots is not None
        block = Block(self.drafter.head, self.drafter.target, self.drafted())
        if random is None and self.drafter.fixed is None:
            return best_first_tree(self.roots, Candidates(block, self.roots), budget)
        return self._filled(block, self.drafter.trees.shape(budget), sampling, random)

    def _filled(
        self, block: "Block", shape: TreeShape, sampling: SamplingConfig, random: RowRandom | None
    ) -> TokenTree:
        """A tree of a given shape: the best guesses behind each real path, or drawn ones."""
        assert self.roots is not None
        shape = shape if random is None else shape.gapless
        levels = self.drafter.levels(shape)
        tokens, states = [self.roots[:, None]], block.begin()
        supports: list[Support] = []
        for depth, level in enumerate(levels):
            own = tokens[-1][:, level.own]  # [B, n]
            codes, states = block.codes(depth, own, states[:, level.above])
            logits = block.logits_behind(depth, codes)  # [B, n, V]
            if random is None:
                guesses = logits.topk(level.width, dim=-1).indices
            else:
                guesses, (ids, probs) = drawn(logits, level.width, sampling, random)
                supports.append((block.tokens_of(ids), probs))
            tokens.append(block.tokens_of(guesses)[:, level.parents, level.ranks])
        filled = torch.cat(tokens, dim=1)
        if random is None:
            return TokenTree.from_shape(shape, filled)
        nodes = torch.cat([level.nodes for level in levels])
        return TokenTree.from_shape(shape, filled, *for_all_nodes(supports, nodes, shape.num_nodes))

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


class Block:
    """What one pass says of a block, and how it depends on the tokens chosen in it."""

    def __init__(self, head: "ParallelHead", target: Target, hidden: torch.Tensor):
        """`hidden` [B, K, D] are the final hidden states of the slots."""
        self.correction, self.hidden = head.correction, hidden
        self.tokens_of = head.tokens_of
        self.logits = head.base_logits(hidden, target).float()  # [B, K, V]

    def begin(self) -> torch.Tensor:
        """The state [B, 1, R] in front of the roots."""
        first = self.hidden[:, :1]
        return first[..., :0] if self.correction is None else self.correction.begin(first)

    def codes(
        self, depth: int, before: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The correction's codes [B, n, rank] of a slot (0 is the first) behind tokens [B, n].

        Takes the states [B, n, R] in front of these tokens and gives those behind them.
        """
        if self.correction is None:
            return state, state
        hidden = self.hidden[:, depth, None].expand(-1, before.shape[1], -1)
        return self.correction.step(before, hidden, state)

    def logits_behind(self, depth: int, codes: torch.Tensor) -> torch.Tensor:
        """Logits [B, n, V] of a slot with the corrections of codes [B, n, rank]."""
        logits = self.logits[:, depth, None]
        if self.correction is None:
            return logits.expand(-1, codes.shape[1], -1)
        return logits + self.correction.output(codes)


class Candidates:
    """The few tokens of each depth that a tree chooses from, for `best_first_tree`.

    Without its correction a slot does not know what it follows, so the candidates are those that
    the average correction favours: over the candidates of the slot before, weighted by how probable
    they are.
    """

    def __init__(self, block: Block, roots: torch.Tensor):
        """Candidates behind the roots [B]."""
        self.block = block
        before, state = roots[:, None], block.begin()
        weights = torch.ones_like(before, dtype=block.hidden.dtype)[..., None]  # [B, n, 1]
        chosen = []
        for depth in range(block.logits.shape[1]):
            codes, states = block.codes(depth, before, state.expand(-1, before.shape[1], -1))
            code, state = ((weights * table).sum(dim=1, keepdim=True) for table in (codes, states))
            logits = block.logits_behind(depth, code)[:, 0]
            best = logits.topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
            chosen.append(best.indices)
            before = block.tokens_of(best.indices)
            weights = best.values.softmax(-1)[..., None].to(weights.dtype)
        guesses = torch.stack(chosen, dim=1)
        self.candidates = block.tokens_of(guesses)  # [B, K, k]
        self.logits = block.logits.gather(-1, guesses)  # [B, K, k]
        if block.correction is not None:
            # In float32: a CPU multiplies small 16-bit matrices many times slower.
            self.outputs = block.correction.output.weight[guesses].float().mT  # [B, K, rank, k]

    def begin(self) -> torch.Tensor:
        """The state [B, 1, R] in front of the roots."""
        return self.block.begin()

    def log_probs(
        self, depth: int, parents: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [B, F, k] of a depth's candidates behind parents [B, F]."""
        codes, state = self.block.codes(depth, parents, state)
        logits = self.logits[:, depth, None].expand(-1, parents.shape[1], -1)
        if self.block.correction is not None:
            logits = logits + codes.float() @ self.outputs[:, depth]
        return logits.log_softmax(-1), state
