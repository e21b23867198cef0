"""Drafting with a recurrent head: its cache, and the trees that it grows or fills."""

import torch

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.drafting.drafter import Committed, DraftSession, OnDevice
from drafthead.core.drafting.row_state import RowState
from drafthead.core.sampling import RowRandom, Sampling
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.heads.families.head_drafter import register_head_drafter
from drafthead.heads.families.late_reader import LateReader
from drafthead.heads.families.recurrent.head import RecurrentHead
from drafthead.heads.families.recurrent.mtp import MtpHead
from drafthead.heads.families.recurrent.passes import Guess, RecurrentPasses
from drafthead.heads.growing.dynamic import Children, dynamic_tree
from drafthead.heads.growing.levels import Guesses, Level, filled_tree
from drafthead.heads.layers.cache import DraftCache


class DraftReader(RowState):
    """A recurrent head with its cache: committed positions stay in it, drafted ones are pending."""

    row_state = ("cache",)

    def __init__(self, drafter: RecurrentPasses, rows: int):
        self.drafter = drafter
        self.cache = DraftCache(drafter.head.layers, rows, drafter.memory)

    def read(self, committed: Committed) -> Guess:
        """Read committed positions; the guesses [B, 1, k] after the last one of each row."""
        tokens, cache, drafter = committed.tokens, self.cache, self.drafter
        is_prompt, end = drafter.is_prompt(cache, tokens.shape[1]), cache.longest + tokens.shape[1]
        given = committed.features.last, committed.features.taps, tokens, committed.lengths
        if is_prompt and cache.no_gaps and drafter.kernels is not None:
            # Kernels that skip what is hidden take no mask; layers that need one have no kernels.
            view, room = cache.view(tokens.shape[1]), cache.room(tokens.shape[1])
            view = view._replace(room=room._replace(seen=room.seen[:end]))
            guess = drafter.read_prompt(*given, view, True)
        else:
            read = drafter.read_prompt if is_prompt else drafter.read
            guess = read(*given, cache.view(tokens.shape[1], drafter.kernels))
        cache.keep_pending(tokens.shape[1])
        cache.commit_first(committed.lengths, committed.counts)
        return guess

    def draft(
        self,
        parents: Guess,  # of the level above
        above: torch.Tensor,  # [B, n] places of each node's parent in it
        tokens: torch.Tensor,  # [B, n]
        depth: int,
        visible: torch.Tensor,  # [B or 1, n, pending + n] bool
    ) -> Guess:
        """The guesses [B, n, k] after drafted nodes of one depth, which stay pending.

        `visible` marks the drafted nodes, these included, that each node is or descends from.
        """
        assert self.cache.lengths is not None
        rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        positions = (self.cache.lengths[:, None] + depth - 1).expand_as(tokens)
        return self._guess_at(parents.outputs[rows, above], tokens, positions, visible)

    def draft_blindly(self, roots: torch.Tensor, root_guess: Guess, depth: int) -> Guess:
        """The guesses [B, depth - 1, k] at depths 1 to depth - 1, for any tokens there.

        Of the roots [B] and the guesses at them only the shapes are used; see `drafts_blindly`.
        """
        assert self.cache.lengths is not None
        steps = torch.arange(depth - 1, device=roots.device)
        tokens = roots[:, None].expand(-1, depth - 1)
        positions = self.cache.lengths[:, None] + steps
        above = root_guess.outputs.expand(-1, depth - 1, -1)
        return self._guess_at(above, tokens, positions, (steps[:, None] >= steps)[None])

    def _guess_at(
        self,
        above: torch.Tensor,  # [B, n, D] outputs at the parents
        tokens: torch.Tensor,  # [B, n]
        positions: torch.Tensor,  # [B, n]
        visible: torch.Tensor,  # [B or 1, n, pending + n] bool
    ) -> Guess:
        """The guesses [B, n, k] after drafted nodes, which stay pending."""
        cache = self.cache
        mask, view = cache.mask(visible), cache.view(tokens.shape[1])
        guess = self.drafter.draft(above, tokens, positions, mask, view)
        cache.keep_pending(tokens.shape[1])
        return guess


class RecurrentSession(LateReader, OnDevice):
    """A recurrent head at work on one batch."""

    row_state = (*LateReader.row_state, "reader", "root_guess")

    def __init__(self, drafter: RecurrentPasses, rows: int):
        super().__init__(drafter.memory)
        self.drafter = drafter
        self.reader = DraftReader(drafter, rows)
        self.root_guess: Guess | None = None  # n = 1

    @torch.no_grad()
    def read(self, committed: Committed) -> None:
        self.root_guess = self.reader.read(committed)

    @torch.no_grad()
    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> TokenTree:
        drafter = self.drafter
        self.reader.cache.settle()
        if isinstance(random, RowRandom) or drafter.fixed is not None:
            self.catch_up()
            tree = self._filled(drafter.shape(budget, random), sampling, random)
        elif drafter.head.drafts_blindly:
            self.catch_up()
            tree = self._grown_blindly(budget, random)
        else:
            return self._grown(budget, random)
        self.reader.cache.discard()
        return tree

    def _grown(self, budget: Budget, draws: NextDraws | None) -> TokenTree:
        """A dynamic tree: it grows where the head is most certain, with `draws` of these.

        Where calls are recorded, what is new is read within the same one.
        """
        drafter, cache, last = self.drafter, self.reader.cache, None
        if not drafter.memory.is_recorded:
            self.catch_up()
        else:
            last = self.read_to_last_part()
        count = sum(drafter.opened(budget))
        if last is None:
            assert self.root_guess is not None
            view = cache.view(count, drafter.kernels)
            tables = drafter.grow_all(self.root_guess, self.roots, view, draws, budget)
        else:
            given = last.features.last, last.features.taps, last.tokens, last.lengths
            room = cache.view_and_room(last, count, drafter.kernels)
            self.root_guess, tables = drafter.read_and_grow_all(*given, *room, draws, budget)
            assert cache.lengths is not None
            cache.advance(cache.lengths + last.lengths, last.bounds, late=last.late)
        return tables.tree(budget.depth, drafter.width)

    def _grown_blindly(self, budget: Budget, draws: NextDraws | None) -> TokenTree:
        """A grown tree of a head whose guesses at a depth are equal after any tokens."""
        assert self.roots is not None and self.root_guess is not None
        width = self.drafter.width
        guesses = self._guesses_ahead(budget.depth)

        def expand(
            tokens: torch.Tensor, above: torch.Tensor, visible: torch.Tensor, depth: int
        ) -> Children:
            return guesses[depth].at_all(tokens.shape[1]).best(width, depth, draws)

        return dynamic_tree(self.roots, budget, guesses[0].best(width, 0, draws), expand)

    def _guesses_ahead(self, depth: int) -> list[Guess]:
        """The guesses, n = 1, at depths 0 to depth - 1, of a head that drafts blindly."""
        assert self.roots is not None and self.root_guess is not None
        if depth == 1:
            return [self.root_guess]
        later = self.reader.draft_blindly(self.roots, self.root_guess, depth)
        one = (Guess(*(part[:, d, None] for part in later)) for d in range(depth - 1))
        return [self.root_guess, *one]

    def _filled(self, shape: TreeShape, sampling: Sampling, random: Choice) -> TokenTree:
        """A tree of a given shape: the best guesses, or guesses drawn without replacement."""
        assert self.roots is not None and self.root_guess is not None
        latest, visible = self.root_guess, self.drafter.visible(shape)
        ahead = self._guesses_ahead(shape.depth) if self.drafter.head.drafts_blindly else None

        def guess(depth: int, level: Level, tokens: torch.Tensor) -> Guesses:
            """After each real path, or whatever the path is."""
            nonlocal latest
            if ahead is not None:
                latest = ahead[depth].at_all(tokens.shape[1])
            elif depth > 0:
                above = level.above.expand_as(tokens)
                latest = self.reader.draft(latest, above, tokens, depth, visible[depth])
            return latest.logits, latest.ids

        levels, scores = self.drafter.levels(shape), self.drafter.scores(shape)
        return filled_tree(shape, levels, self.roots, guess, sampling, random, scores)


@register_head_drafter(RecurrentHead)
class RecurrentDrafter(RecurrentPasses):
    """A recurrent head on dynamic trees, and on static ones where children are drawn.

    The static trees are the fixed one, or those grown from measured paths.
    """

    on_device = True

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        self.follow_weights()
        if self.head.in_one_call is not None:
            own = self.head.embed_tokens
            self.embedding = own or self.target.model.get_input_embeddings()
        return RecurrentSession(self, rows=len(lengths))


@register_head_drafter(MtpHead)
class MtpDrafter(RecurrentDrafter):
    """An MTP layer as a drafter; its passes run as transformers has them, not compiled."""

    def __init__(self, head: RecurrentHead, target: Target, shape: TreeShape | None):
        """Raises UserError as for any head, and for a layer that does not run alone."""
        super().__init__(head, target, shape)
        DraftCache(head.layers, rows=1)  # tries the layer

    def prepare(self, target: Target | None) -> None:
        """Draft for this compiled target: kernels and recordings of ours do not know its layer."""
        self.target = target or self.target
