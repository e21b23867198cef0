"""Drafting with a recurrent head: its cache, and the trees that it grows or fills."""

import torch

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.drafting.drafter import Committed, DraftSession, OnDevice
from drafthead.core.row_state import RowState
from drafthead.core.sampling import RowRandom, Sampling
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.heads.families.head_drafter import register_head_drafter
from drafthead.heads.families.late_reader import LateReader
from drafthead.heads.families.recurrent.head import RecurrentHead
from drafthead.heads.families.recurrent.mtp import MtpHead
from drafthead.heads.families.recurrent.passes import RecurrentPasses
from drafthead.heads.growing.dynamic import dynamic_tree
from drafthead.heads.growing.levels import Expand, Guess, Nodes, blind, known_at_roots
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
            guess = drafter.reading(drafter.read, True)(*given, view, True)
        else:
            read = drafter.reading(drafter.read, is_prompt)
            guess = read(*given, cache.view(tokens.shape[1], drafter.kernels))
        cache.keep_pending(tokens.shape[1])
        cache.commit_first(committed.lengths, committed.counts)
        return guess

    def expand(self, nodes: Nodes) -> Guess:
        """The guesses [B, n, k] after drafted nodes of one depth, which stay pending."""
        assert self.cache.lengths is not None
        positions = (self.cache.lengths[:, None] + nodes.depth - 1).expand_as(nodes.tokens)
        return self._guess_at(nodes.states, nodes.tokens, positions, nodes.visible)

    def draft_blindly(self, roots: torch.Tensor, root_guess: Guess, depth: int) -> Guess:
        """The guesses [B, depth - 1, k] at depths 1 to depth - 1, for any tokens there.

        Of the roots [B] and the guesses at them only the shapes are used; see `drafts_blindly`.
        """
        assert self.cache.lengths is not None
        steps = torch.arange(depth - 1, device=roots.device)
        tokens = roots[:, None].expand(-1, depth - 1)
        positions = self.cache.lengths[:, None] + steps
        above = root_guess.states.expand(-1, depth - 1, -1)
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
        draft = self.drafter.whole(self.drafter.draft)
        guess = draft(above, tokens, positions, mask, view)
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
            assert self.roots is not None and self.root_guess is not None
            expand = self.expansion(drafter.shape(budget, random).depth)
            given = self.roots, self.root_guess.states, expand
            tree = drafter.filled(budget, *given, sampling, random)
        elif drafter.head.drafts_blindly:
            self.catch_up()
            assert self.roots is not None and self.root_guess is not None
            expand = self.expansion(budget.depth)
            tree = dynamic_tree(self.roots, self.root_guess, budget, drafter.width, expand, random)
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
            assert self.root_guess is not None and self.roots is not None
            view = cache.view(count, drafter.kernels)
            tables = drafter.whole(drafter.grow)(self.root_guess, self.roots, view, draws, budget)
        else:
            given = last.features.last, last.features.taps, last.tokens, last.lengths
            room = cache.view_and_room(last, count, drafter.kernels)
            read_and_grow = drafter.whole(drafter.read_and_grow)
            self.root_guess, tables = read_and_grow(*given, *room, draws, budget)
            assert cache.lengths is not None
            cache.advance(cache.lengths + last.lengths, last.bounds, late=last.late)
        return tables.tree(budget.depth, drafter.width)

    def expansion(self, depth: int) -> Expand:
        """The guesses after nodes, in trees of up to so many levels.

        A head that drafts blindly guesses alike after any tokens, in one pass for all depths.
        """
        assert self.roots is not None and self.root_guess is not None
        ahead = self.root_guess
        if not self.drafter.head.drafts_blindly:
            return known_at_roots(ahead, self.reader.expand)
        if depth > 1:
            later = self.reader.draft_blindly(self.roots, ahead, depth)
            ahead = Guess(*(torch.cat(parts, dim=1) for parts in zip(ahead, later, strict=True)))
        return blind(ahead)


@register_head_drafter(RecurrentHead)
class RecurrentDrafter(RecurrentPasses):
    """A recurrent head on dynamic trees, and on static ones where children are drawn.

    The static trees are the fixed one, or those grown from measured paths.
    """

    def session(self, rows: int) -> DraftSession:
        if self.head.in_one_call is not None:
            own = self.head.embed_tokens
            self.embedding = own or self.target.model.get_input_embeddings()
        return RecurrentSession(self, rows)


@register_head_drafter(MtpHead)
class MtpDrafter(RecurrentDrafter):
    """An MTP layer as a drafter; its passes run as transformers has them."""

    def __init__(self, head: RecurrentHead, target: Target, shape: TreeShape | None):
        """Raises UserError as for any head, and for a layer that does not run alone."""
        super().__init__(head, target, shape)
        DraftCache(head.layers, rows=1)  # tries the layer

    def compile(self, target: Target) -> None:
        """Draft for this target: kernels and recordings of ours do not know its layer."""
        self.target = target
