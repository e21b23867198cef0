"""Beginnings of prompts that were read before and need not be read again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from drafthead.core.drafting.drafter import Committed, Drafter, NoDraft, NoDrafter
from drafthead.core.kv_cache.column_cache import ColumnCache
from drafthead.core.row_state import chosen, leaves
from drafthead.core.target.features import Features
from drafthead.core.target.weight_state import state_of
from drafthead.infer.drafters.lookup import Lookup
from drafthead.infer.engine.prefill import LAST_READ, ReadState

# Share of the longest prompt that has to be known: a pass after a cache needs a mask, and takes 10
# to 15 % longer than one from the beginning (demo target, 600 tokens).
LEAST_SHARE = 1 / 8


@dataclass(frozen=True)
class Past(ReadState):
    """Tokens that were read, and what the target and the drafter know of them."""

    tokens: Sequence[int]  # the last ones may not be in the cache
    salt: str = ""  # of the request that it was read for
    drafter: Drafter | None = None  # whose the session is

    def reusable(self, prompts: Sequence[Sequence[int]]) -> int:
        """Positions of this past, of one row, that also begin all prompts.

        The last common token is read again: what the session knows of its position may depend on
        the token after it, and the pass over a prompt needs at least one token.
        """
        common = min(common_prefix(self.tokens, prompt) for prompt in prompts)
        unread = 1 if self.cache.cuts_anywhere else LAST_READ  # a state after one token is a step's
        return self.cuttable(max(0, min(common - 1, *(len(prompt) - unread for prompt in prompts))))

    def cuttable(self, length: int) -> int:
        """To how many positions, `length` at most, it can be cut."""
        of_drafter = [cache for cache in self.caches if cache is not self.cache]
        if not all(cache.cuts_anywhere for cache in of_drafter):
            return 0  # those of a draft model with running states, which has read other tokens
        return self.cache.cuttable(length)

    def cut(self, length: int) -> None:
        """Forget all after the first `length` positions, or after as many as it can be cut to."""
        if length := self.cuttable(length):
            self.cache.cut(length)
            self.session.cut(length)

    @property
    def caches(self) -> list[ColumnCache]:
        """The caches of the target and of the drafter."""
        parts = leaves([self.cache, self.session])
        return [part for part in parts if isinstance(part, ColumnCache)]

    @property
    def bytes(self) -> int:
        """The bytes of the tensors."""
        states = [each for cache in self.caches for each in cache.held]
        parts = (*leaves([self.cache, self.session]), *states)
        return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))

    def copied(self, rows: int, length: int) -> "Past":
        """A past of its own for each of `rows` rows: the first `length` positions of this one."""
        assert self.cache.lengths is not None
        places = torch.zeros(rows, dtype=torch.long, device=self.cache.lengths.device)
        cache, session = chosen(self.cache, places), chosen(self.session, places)
        copy = replace(self, cache=cache, session=session)
        copy.cut(length)
        for cache in copy.caches:
            cache.untrim()
        return copy


class Memory:
    """Prompts that a decoder remembers. Several threads may use it: a past in it never changes."""

    def __init__(self, model: nn.Module):
        """`model` is the target's."""
        self.model = model
        self.pasts: list[tuple[Past, Any]] = []  # with the state of the weights that read it
        self.kept: list[tuple[Past, Any]] = []  # of answers, the last ones
        self.most_kept = 0
        self.most_bytes = 2 << 30  # that kept answers take
        self.latest: Any = None  # state

    def known(self, salt: str = "") -> list[Past]:
        """Pasts of requests of a salt that the model would read in the same way today."""
        if not (pasts := [*self.pasts, *self.kept]):  # another thread may add one meanwhile
            return []
        now = self.state()
        known = [past for past, state in pasts if state is now or state == now]
        return [past for past in known if past.salt == salt]

    def state(self) -> Any:
        """The state of the weights now: take it before they read what is then added or kept."""
        now = state_of(self.model)
        if now != self.latest:
            self.latest = now
        return self.latest  # one object while nothing changes, which is quick to compare

    def add(self, past: Past, state: Any) -> None:
        """Remember a prompt of one row that weights in that state have read to its end."""
        past.cut(len(past.tokens) - 1)
        self.pasts.append((past, state))

    def keep(self, past: Past, state: Any) -> None:
        """Keep what was read for an answer of one row, until `most_kept` later ones have ended.

        It takes the place of one that it goes on with, and of earlier ones where all take more than
        `most_bytes`; `state` is as for `add`.
        """
        past.cut(len(past.tokens) - 1)
        for cache in past.caches:
            cache.trim()
        rest = [
            (old, state)
            for old, state in self.kept
            if common_prefix(old.tokens, past.tokens) < len(old.tokens) or old.salt != past.salt
        ]
        kept = [*rest, (past, state)][-self.most_kept :]
        sizes = accumulate(past.bytes for past, _ in reversed(kept))
        fit = sum(size <= self.most_bytes for size in sizes)
        self.kept = kept[len(kept) - fit :]

    def recall(
        self, prompts: Sequence[Sequence[int]], drafter: Drafter, salt: str = ""
    ) -> Past | None:
        """A copy, a row for each prompt, of the longest beginning that all prompts have in common
        with a remembered one; None where there is none that saves time.
        """
        plain, known = isinstance(drafter, NoDrafter), self.known(salt)
        # A session knows what its own drafter asks; for lookup the tokens are enough.
        if not (plain or isinstance(drafter, Lookup)):
            known = [each for each in known if each.drafter is drafter]
        length, past = longest_of(known, prompts)
        if past is None:
            return None
        copy = past.copied(len(prompts), length)
        # A rule that draws may be decoded plainly where greedy answers are drafted.
        if plain:
            return replace(copy, session=NoDraft())
        if past.drafter is not drafter:
            ids = torch.tensor([past.tokens[: length + 1]] * len(prompts))
            lengths = torch.full((len(prompts),), length)
            session = drafter.start(ids, lengths)
            session.commit(Committed(ids[:, 1:], Features(None), lengths, salt=salt))
            return replace(copy, session=session)
        return copy


def longest_of(pasts: Sequence[Past], prompts: Sequence[Sequence[int]]) -> tuple[int, Past | None]:
    """The past with the longest beginning of all prompts, and its length; none that saves no time.

    Of equally long ones it is the first.
    """
    known = [(past.reusable(prompts), past) for past in pasts]
    length, past = max(known, key=lambda pair: pair[0], default=(0, None))
    return (length, past) if length >= LEAST_SHARE * max(map(len, prompts)) else (0, None)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens that two sequences begin with alike: 2 for ``a b c`` and ``a b d e``."""
    one, other = list(first), list(second)
    alike, most = 0, min(len(one), len(other))
    while alike < most:  # halves are compared at once: a loop over tokens would be one in each step
        middle = (alike + most + 1) // 2
        if one[alike:middle] == other[alike:middle]:
            alike = middle
        else:
            most = middle - 1
    return alike
