"""The interface of drafters: they propose token trees and learn what the target committed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from drafthead.core.coupling import Choice
from drafthead.core.drafting.form import Forms, Wanted
from drafthead.core.host import to_host
from drafthead.core.kv_cache.column_cache import READ_CHUNK, FreshMemory
from drafthead.core.row_state import RowState
from drafthead.core.sampling import NO_TOKEN, Sampling
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.target import Target
from drafthead.core.target.tree_cache import TreeCache
from drafthead.core.trees.guesses import Proposal
from drafthead.core.trees.tree import Budget


def at_last(table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The entries [B, ...] of table [B, T, ...] at the last position of each row.

    Lengths 3 and 1 select place 2 of the first row and place 0 of the second.
    """
    rows = torch.arange(lengths.shape[0], device=lengths.device)
    return table[rows, lengths - 1]


class Ends(NamedTuple):
    """The root that follows the last committed position of each row, and the state there."""

    roots: torch.Tensor  # [B] tokens
    hidden: torch.Tensor | None  # [B, D] the target's final hidden states, where they are kept


@dataclass
class LateTokens:
    """The tokens of a commit whose step may still run on the device."""

    wait: Callable[[], list[list[int]]]  # for the step: the tokens of each row
    known: list[list[int]] | None = None  # once the host has read them

    def now(self) -> list[list[int]]:
        """The tokens of each row, after waiting for them if need be."""
        if self.known is None:
            self.known = self.wait()
        return self.known


@dataclass(frozen=True)
class Committed:
    """The tokens that a target committed in one pass, with what a drafter needs to go on.

    For each row: the target's features at the committed positions, and the token that follows each
    of them. After a pass that accepted "b c" after root "a" and added the bonus token "d", the
    positions are those of a, b, c and the tokens are b, c, d. Positions at or beyond a row's length
    are padding. The last token is the next root.
    """

    tokens: torch.Tensor  # [B, T]
    features: Features  # of [B, T] positions
    lengths: torch.Tensor  # [B], at least 1
    width: int | None = None  # the largest length, where T may be larger
    known_ends: Ends | None = None
    host_tokens: list[list[int]] | None = None  # `tokens` without padding, if the host has them
    # The target's cache of the whole batch, for drafters that read it. A proposal may write nodes
    # into it, which it discards.
    cache: TreeCache | None = None
    late: LateTokens | None = None  # in place of `host_tokens`, where the step may still run
    salt: str = ""  # of prompts: what their rows say is known to rows of the same alone

    @cached_property
    def ends(self) -> Ends:
        """The next roots and what predicted them; already known after a step in one call."""
        if self.known_ends is not None:
            return self.known_ends
        last = self.features.last
        hidden = None if last is None else at_last(last, self.lengths)
        return Ends(at_last(self.tokens, self.lengths), hidden)

    @cached_property
    def new_tokens(self) -> list[list[int]]:
        """Each row's tokens as lists; waits for the device only where the host has none.

        In rows that have failed, token 0 stands for NO_TOKEN, which no model or tokenizer can read.
        """
        found = self.late.now() if self.late is not None else self.host_tokens
        if found is None:
            pairs = zip(to_host(self.tokens), to_host(self.lengths), strict=True)
            found = [tokens[:length] for tokens, length in pairs]
        if not any(NO_TOKEN in tokens for tokens in found):
            return found
        return [[max(token, 0) for token in tokens] for tokens in found]

    @property
    def counts(self) -> list[int]:
        """`lengths` as the host knows them."""
        return [len(tokens) for tokens in self.new_tokens]

    @property
    def bounds(self) -> list[int]:
        """`counts`, or the most that they can be where the host would have to wait for them."""
        if self.late is not None and self.late.known is None:
            return [self.tokens.shape[1]] * len(self.tokens)
        return self.counts

    def of_rows(self, rows: Sequence[int]) -> "Committed":
        """The commits of some rows, in that order."""
        places = torch.tensor(rows, device=self.tokens.device)
        new_tokens = [self.new_tokens[row] for row in rows]
        return Committed(
            self.tokens[places],
            self.features.map(lambda table: table[places]),
            self.lengths[places],
            width=max(map(len, new_tokens)),
            host_tokens=new_tokens,
            cache=self.cache,
            salt=self.salt,
        )

    def cut(self) -> "Committed":
        """These positions without those that are padding in every row."""
        if self.width in (None, self.tokens.shape[1]):
            return self

        def cut(part: torch.Tensor) -> torch.Tensor:
            # A contiguous copy: a view would keep the wider table's row stride, and every stride
            # is another recording.
            return part[:, : self.width].clone(memory_format=torch.contiguous_format)

        tokens, features = cut(self.tokens), self.features.map(cut)
        return Committed(tokens, features, self.lengths, None, self.known_ends, self.host_tokens)

    def sized(self, memory: FreshMemory) -> "Committed":
        """These positions padded to as many as passes with this memory are made for."""
        return self.padded(memory.size(self.tokens.shape[1]))

    def padded(self, positions: int) -> "Committed":
        """These positions padded to so many."""
        missing = positions - self.tokens.shape[1]
        if missing <= 0:
            return self
        features = self.features.map(lambda table: pad(table, (0, 0, 0, missing)))
        tokens = pad(self.tokens, (0, missing))
        return replace(self, tokens=tokens, features=features)

    def chunks(self, size: int = READ_CHUNK) -> Iterator["Committed"]:
        """These positions in parts of at most `size`, the last of which every row is part of.

        In parts of 2, rows ``a b c`` and ``d`` are ``a`` and nothing, then ``b c`` and ``d``.
        """
        longest = self.tokens.shape[1]
        if longest <= size:
            yield self
            return
        rows = torch.arange(len(self.lengths), device=self.lengths.device)[:, None]
        starts, read = torch.zeros_like(self.lengths), [0] * len(self.counts)
        for later in range((longest - 1) // size * size, -1, -size):
            ends = (self.lengths - later).clamp_min(0)
            steps = torch.arange(min(size, longest - later), device=starts.device)
            places = starts[:, None] + steps
            places = places.clamp_max(longest - 1)

            def part(table: torch.Tensor, places: torch.Tensor = places) -> torch.Tensor:
                return table[rows, places]

            yield Committed(
                part(self.tokens),
                self.features.map(part),
                ends - starts,
                known_ends=self.known_ends if later == 0 else None,
                host_tokens=[
                    tokens[start : max(0, len(tokens) - later)]
                    for tokens, start in zip(self.new_tokens, read, strict=True)
                ],
            )
            starts, read = ends, [max(0, count - later) for count in self.counts]


class DraftSession(RowState, ABC):
    """A drafter at work on one batch: proposes a tree, learns what was committed, and again.

    Rows leave the batch and others join it; `row_state` names what the session knows of each.
    After `cut` to the first positions, the next commit is of the positions from there on.
    """

    wanted: Wanted = None  # by the rows of the next proposal, for sessions of several drafters
    forms: Forms = None  # of the same rows, for sessions of lookup

    @abstractmethod
    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> Proposal:
        """A tree within the budget after the last committed token.

        A `Free` budget asks for `Guesses`.
        With a `RowRandom`, children are drawn without replacement and the tree carries the
        distributions they were drawn from. With `NextDraws`, they are the likeliest to be the
        target's own draws. Without either, they are the most probable tokens.
        """

    @abstractmethod
    def commit(self, committed: Committed) -> None:
        """Record what the target committed; called after the prompt pass and after every step.

        A step may have run without a proposal.
        """


class OnDevice(DraftSession):
    """A session that drafts after a commit whose tokens the device alone knows.

    It may propose again when rows have left meanwhile.
    """


class Drafter(ABC):
    """Whatever proposes tokens: a head, a draft model, prompt lookup."""

    features: FeatureSpec
    names: tuple[str, ...] = ("drafter",)  # of its parts, by which a request chooses among them
    # Sizes that it can use, with what is known of each before decoding. The last one is used where
    # nothing chooses. Where that is a chain, children are drawn in chains.
    budgets: tuple[Budget, ...]
    # The lossless rule above temperature 0 that accepts most of its trees, as measured by
    # benchmarks/rules.py. Another one than `match` has to accept clearly more: it does not run in
    # the graph of a step, and its trees cannot change their size from step to step.
    sampling_rule: str = "match"

    def __repr__(self) -> str:
        """The parts on which a proposal's time depends, besides its budget and the target.

        Costs of steps are kept on disk by this name.
        """
        return type(self).__name__

    def compile(self, target: Target) -> None:  # noqa: B027  (nothing to change)
        """Draft from now on as the passes of this target run: by our kernels, or recorded."""

    @abstractmethod
    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session for prompts [B, T], right-padded, of the given lengths [B]."""


class NoDrafter(Drafter):
    """The drafter of plain decoding, which proposes nothing."""

    features = FeatureSpec(layers=(), last=False)
    budgets = ()

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:  # [B, T], [B]
        return NoDraft()


class NoDraft(OnDevice):
    """A session without a memory."""

    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> Proposal:
        """Raises NotImplementedError: steps without a drafter have no budget."""
        raise NotImplementedError

    def commit(self, committed: Committed) -> None:
        """Nothing to remember."""
