"""Drafting with a block-parallel head: its context, its candidates, and the trees of them."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch

from drafthead.heads.cache import CacheColumns
from drafthead.heads.cache_memory import CacheMemory
from drafthead.heads.coupling import DRAWS, Choice, NextDraws
from drafthead.heads.drafting.drafter import Committed, DraftSession, at_last
from drafthead.heads.drafting.late_reader import LateReader
from drafthead.heads.families.head_drafter import HeadDrafter, register_drafter
from drafthead.heads.families.parallel import ParallelHead
from drafthead.heads.graphs.compiled import Compiled
from drafthead.heads.graphs.dims import Spec
from drafthead.heads.layers.cache import DraftCache
from drafthead.heads.layers.decoder_layer import Store
from drafthead.heads.sampling import DRAFT_SUPPORT, RowRandom, SamplingConfig, arrival_times
from drafthead.heads.target.target import Target
from drafthead.heads.trees.best_first import best_first_tree
from drafthead.heads.trees.levels import Guesses, Level, best_guesses, filled_tree
from drafthead.heads.trees.static import tree_budgets
from drafthead.heads.trees.tree import Budget, TokenTree, TreeShape

CANDIDATES = 16  # tokens of each depth that a best-first tree chooses from

# Dimensions of the arguments of compiled passes. A block has as many slots at every call.
CACHE = {"keys": "B . C .", "values": "B . C ."}
READING = {"taps": "B T .", "positions": "B T", "columns": "T", **CACHE}
DRAFTING = {
    "roots": "B",
    "before": "B .",
    "positions": "B .",
    "mask": "B . . S",
    "columns": ".",
    **CACHE,
}
GROWING = {
    "roots": "B",
    "hidden": "B . .",
    "ids": "B . .",
    "logits": "B . .",
    "outputs": "B . . .",
}

Tensors = tuple[torch.Tensor, ...]
Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # see `Candidates.tables`


@register_drafter(ParallelHead)
class ParallelDrafter(HeadDrafter[ParallelHead]):
    """A block-parallel head on its most probable trees, or on static ones."""

    def __init__(self, head: ParallelHead, target: Target, shape: TreeShape | None):
        """Raises UserError when the tree is deeper than the block."""
        super().__init__(head, target, shape, tree_budgets(head.depth))
        self.read: Callable[..., torch.Tensor] = self.read_eagerly
        self.block: Callable[..., Tensors] = self._block
        self.candidates: Callable[..., Tables] = self._candidates
        self.compiled_trees: dict[Budget, Compiled] | None = None

    @cached_property
    def inside(self) -> torch.Tensor:
        """Which slots of a block see which, [1, block_size, block_size]."""
        return self.head.transformer.visible(1, self.target.device)[None]

    def read_eagerly(
        self,
        taps: Tensors,  # [B, T, D] each
        positions: torch.Tensor,  # [B or 1, T]
        columns: torch.Tensor,  # [T]
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Fused features [B, T, D] of committed positions, whose keys and values are written."""
        transformer = self.head.transformer
        fused = transformer.fused(taps)
        cached = CacheColumns(keys, values, columns, end=0)
        for layer, states in enumerate(transformer.context(fused, positions)):
            cached.append(layer, *states)
        return fused

    def _block(
        self,
        roots: torch.Tensor,  # [B]
        before: torch.Tensor,  # [B, D], fused features before the roots
        positions: torch.Tensor,  # [B, 1] of the roots
        mask: torch.Tensor,  # [B or 1, 1, block_size, S]
        columns: torch.Tensor,  # [block_size]
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> Tensors:
        """Hidden states [B, K, D] of the block after the roots, and its logits [B, K, Vd]."""
        transformer = self.head.transformer
        cached = CacheColumns(keys, values, columns, mask.shape[-1])
        stores: list[Store] = [
            partial(cached.append, layer) for layer in range(len(transformer.layers))
        ]
        block = roots[:, None], before[:, None]  # one block a row
        hidden = transformer(self.target, *block, positions, mask, stores)[:, 0]
        return hidden, self.head.base_logits(hidden, self.target).float()

    def _candidates(
        self,
        roots: torch.Tensor,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        draws: NextDraws | None,
    ) -> Tables:
        """The tables of `Candidates` after roots [B], from the outputs of `block`."""
        return Candidates.of(Block(self.head, hidden, logits), roots, draws).tables()

    def guesses(
        self,
        hidden: torch.Tensor,  # [B, D] of a slot
        logits: torch.Tensor,  # [B, Vd] of the slot, before the correction
        states: torch.Tensor,  # [B, m, R] of the inner nodes one level up
        level: Level,
        tokens: torch.Tensor,  # [B, n]
    ) -> tuple[torch.Tensor, Guesses]:
        """States [B, n, R] of inner nodes of a level, and the guesses of their children."""
        block = Block(self.head, hidden[:, None], logits[:, None])
        codes, states = block.codes(0, tokens, states[:, level.above])
        return states, best_guesses(block.logits_after(0, codes), self.head.draft_ids)

    def tree(
        self,
        budget: Budget,
        roots: torch.Tensor,  # [B]
        hidden: torch.Tensor,  # [B, K, D] of `block`
        logits: torch.Tensor,  # [B, K, Vd] of `block`
        draws: NextDraws | None,
    ) -> TokenTree:
        """The most probable tree after the roots; with `draws`, of the target's own draws."""
        draws = None if draws is None else draws.padded(logits.shape[1])
        tables = self.candidates(roots, hidden, logits, draws)
        if self.compiled_trees is None:
            return TokenTree(*self._tree(budget, roots, hidden, *tables))
        if budget not in self.compiled_trees:
            grow = partial(self._tree, budget)
            made_for = self.target.device, self.target.dtype
            # Another thread may have been quicker: its graphs are not to be made again.
            compiled = Compiled(grow, *made_for, GROWING, reads=self.read_by_graphs)
            self.compiled_trees.setdefault(budget, compiled)
        return TokenTree(*self.compiled_trees[budget](roots, hidden, *tables))

    def _tree(
        self,
        budget: Budget,
        roots: torch.Tensor,  # [B]
        hidden: torch.Tensor,  # [B, K, D]
        ids: torch.Tensor,  # [B, K, k]
        logits: torch.Tensor,  # [B, K, k]
        outputs: torch.Tensor | None,  # [B, K, rank, k]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """The fields of the `TokenTree`: a graph returns tensors and numbers only."""
        scorer = Candidates(Block(self.head, hidden), ids, logits, outputs)
        tree = best_first_tree(roots, scorer, budget)
        return tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.max_depth, tree.width

    def compile(self) -> None:
        """Compile the passes, and the trees of each size when they are first grown."""
        self.memory = CacheMemory.where_recorded(self.target.device)
        made_for = self.target.device, self.target.dtype
        reads = self.read_by_graphs
        self.read = Compiled(self.read_eagerly, *made_for, READING, reads=reads)
        self.block = Compiled(self._block, *made_for, DRAFTING, reads=reads)
        candidates: dict[str, Spec] = {
            "roots": "B",
            "hidden": "B . .",
            "logits": "B . .",
            "draws": DRAWS,
        }
        self.candidates = Compiled(self._candidates, *made_for, candidates, reads=reads)
        self.compiled_trees = {}

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session for prompts [B, T]; their features come with the first commit."""
        return ParallelSession(self, rows=len(lengths))


class ParallelSession(LateReader):
    """A block-parallel head at work: the state is the context's keys and values."""

    row_state = (*LateReader.row_state, "cache", "before")

    def __init__(self, drafter: ParallelDrafter, rows: int):
        super().__init__(drafter.memory)
        self.drafter = drafter
        self.cache = DraftCache(drafter.head.transformer.layers, rows, drafter.memory)
        self.before: torch.Tensor | None = None  # [B, D], fused features before the roots

    @torch.no_grad()
    def read(self, committed: Committed) -> None:
        """Add what was committed to the context."""
        tokens, lengths, cache = committed.tokens, committed.lengths, self.cache
        # Prompts are seldom of one length, so a graph for each would be used once.
        read = self.drafter.read_eagerly if cache.is_empty else self.drafter.read
        positions, columns = cache.positions(tokens.shape[1]), cache.make_room(tokens.shape[1])[1]
        fused = read(committed.features.taps, positions, columns, cache.keys, cache.values)
        cache.keep_pending(tokens.shape[1])
        cache.commit_first(lengths, committed.counts)
        self.before = at_last(fused, lengths)

    @torch.no_grad()
    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """One pass over the block, then a tree of its guesses."""
        hidden, logits = self._passed()
        assert self.roots is not None
        drafter = self.drafter
        if not isinstance(random, RowRandom) and drafter.fixed is None:
            return drafter.tree(budget, self.roots, hidden, logits, random)
        shape = drafter.shape(budget, random)
        states = Block(drafter.head, hidden).begin()

        def guess(depth: int, level: Level, tokens: torch.Tensor) -> Guesses:
            """After each real path."""
            nonlocal states
            slot = hidden[:, depth], logits[:, depth]
            states, guesses = drafter.guesses(*slot, states, level, tokens)
            return guesses

        return filled_tree(shape, drafter.levels(shape), self.roots, guess, sampling, random)

    def block_states(self) -> torch.Tensor:
        """Hidden states [B, K, D] of the block after the roots."""
        return self._passed()[0]

    def _passed(self) -> Tensors:
        """The outputs of a pass over the block, whose keys and values are not kept."""
        self.catch_up()
        cache, transformer = self.cache, self.drafter.head.transformer
        assert self.roots is not None and cache.lengths is not None
        mask = cache.mask(self.drafter.inside)
        columns = cache.make_room(transformer.config.block_size)[1]
        positions = cache.lengths[:, None]
        block = self.roots, self.before
        return self.drafter.block(*block, positions, mask, columns, cache.keys, cache.values)


class Block:
    """The outputs of one pass over a block, and the correction by the tokens chosen in it."""

    def __init__(
        self, head: ParallelHead, hidden: torch.Tensor, logits: torch.Tensor | None = None
    ):
        """`hidden` [B, K, D] and `logits` [B, K, Vd] are those of the slots."""
        self.correction, self.tokens_of = head.correction, head.tokens_of
        self.hidden, self.logits = hidden, logits

    def begin(self) -> torch.Tensor:
        """The state [B, 1, R] before the roots."""
        first = self.hidden[:, :1]
        return first[..., :0] if self.correction is None else self.correction.begin(first)

    def codes(
        self, depth: int, before: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The correction's codes [B, n, rank] of a slot (0 is the first) after tokens [B, n].

        Takes the states [B, n, R] before these tokens and also returns the states after them.
        """
        if self.correction is None:
            return state, state
        hidden = self.hidden[:, depth, None].expand(-1, before.shape[1], -1)
        return self.correction.advance(before, hidden, state)

    def logits_after(self, depth: int, codes: torch.Tensor) -> torch.Tensor:
        """Logits [B, n, Vd] of a slot with the corrections of codes [B, n, rank]."""
        assert self.logits is not None
        logits = self.logits[:, depth, None]
        if self.correction is None:
            return logits.expand(-1, codes.shape[1], -1)
        return logits + self.correction.output(codes)


class Candidates:
    """The few tokens of each depth that a tree chooses from, for `best_first_tree`."""

    def __init__(
        self,
        block: Block,
        candidates: torch.Tensor,  # [B, K, k] tokens
        logits: torch.Tensor,  # [B, K, k] before the correction
        outputs: torch.Tensor | None,  # [B, K, rank, k]: codes times these are the correction
    ):
        self.block, self.candidates, self.logits, self.outputs = block, candidates, logits, outputs

    @classmethod
    def of(cls, block: Block, roots: torch.Tensor, draws: NextDraws | None = None) -> "Candidates":
        """Candidates after the roots [B]; with `draws`, of the target's own draws.

        The correction of a slot depends on the token before it, which is not chosen yet. So the
        candidates are the best after the mean correction over the candidates of the slot before,
        weighted by their probabilities.
        """
        assert block.logits is not None
        before, state = roots[:, None], block.begin()
        weights = torch.ones_like(before, dtype=block.hidden.dtype)[..., None]  # [B, n, 1]
        chosen = []
        for depth in range(block.logits.shape[1]):
            codes, states = block.codes(depth, before, state.expand(-1, before.shape[1], -1))
            code, state = ((weights * table).sum(dim=1, keepdim=True) for table in (codes, states))
            logits = block.logits_after(depth, code)[:, 0]
            most = CANDIDATES if draws is None else DRAFT_SUPPORT
            best, places = logits.topk(min(most, logits.shape[-1]), dim=-1)
            if draws is not None:
                ids = block.tokens_of(places)
                best, order = draws.best(depth, best, ids, min(CANDIDATES, ids.shape[-1]))
                places = places.gather(-1, order)
            chosen.append(places)
            before = block.tokens_of(places)
            weights = best.softmax(-1)[..., None].to(weights.dtype)
        guesses = torch.stack(chosen, dim=1)
        ids, base = block.tokens_of(guesses), block.logits.gather(-1, guesses)
        outputs: torch.Tensor | None = None
        if block.correction is not None:
            # In float32: a CPU multiplies small 16-bit matrices many times slower.
            outputs = block.correction.output.weight[guesses].float().mT
        if draws is not None:  # so that `log_probs` after any parent are those of `draws.best`
            temperature = draws.settings[0]
            base = base / temperature - arrival_times(draws.keys, ids).log()
            outputs = None if outputs is None else outputs / temperature
        return cls(block, ids, base, outputs)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Tokens [B, K, k], logits [B, K, k] and output rows [B, K, rank, k]: all but the block."""
        return self.candidates, self.logits, self.outputs

    def begin(self) -> torch.Tensor:
        """The state [B, 1, R] before the roots."""
        return self.block.begin()

    def log_probs(
        self, depth: int, parents: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Scorer` has it: log-probabilities [B, F, k] of a depth's candidates, and states."""
        codes, state = self.block.codes(depth, parents, state)
        logits = self.logits[:, depth, None].expand(-1, parents.shape[1], -1)
        if self.outputs is not None:
            logits = logits + codes.float() @ self.outputs[:, depth]
        return logits.log_softmax(-1), state
