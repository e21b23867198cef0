"""The tokens of a row so far, and what followed its last few tokens when they occurred before."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import torch

from drafthead.heads.drafting.drafter import NO_OUTLOOK, Committed, Drafter, DraftSession
from drafthead.heads.host import to_host
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.trees.tree import Budget

MAX_NGRAM = 3
TYPICAL_ROWS = 8  # rows by which the outlook of a batch is told, because each takes time


class Past:
    """The tokens of one row, and where the token after each n-gram's last occurrence is."""

    def __init__(self, first: int):
        self.tokens = [first]
        self.followed_at: dict[tuple[int, ...], int] = {}
        self.outlook: int | None = None  # of what comes next, once it was asked for

    def append(self, token: int) -> None:
        """Add a token: it follows every n-gram that ends just before it."""
        place = len(self.tokens)
        for size in range(1, min(MAX_NGRAM, place) + 1):
            self.followed_at[tuple(self.tokens[place - size :])] = place
        self.tokens.append(token)
        self.outlook = None

    def __copy__(self) -> "Past":
        """A past that goes on by itself."""
        twin = Past(self.tokens[0])
        twin.tokens, twin.followed_at = self.tokens.copy(), self.followed_at.copy()
        return twin

    def first_tokens(self, count: int) -> "Past":
        """The past as it was when it had `count` tokens."""
        if count >= len(self.tokens):
            return self
        earlier = Past(self.tokens[0])
        for token in self.tokens[1:count]:
            earlier.append(token)
        return earlier

    def continuation(self, count: int, least: int = 1) -> list[int]:
        """`count` tokens, or none, that followed the longest n-gram that the row ends with.

        N-grams of fewer than `least` tokens do not count. In ``a b c d a b`` the last bigram
        ``a b`` was followed by ``c d a b`` before. What follows those is not there yet: it is taken
        to be what followed them before, so the text goes on in a circle, ``c d a b c d``.
        """
        size = self.matched(least)
        if size == 0:
            return []
        place = self.followed_at[tuple(self.tokens[-size:])]
        found = self.tokens[place : place + count]
        return [found[i % len(found)] for i in range(count)]

    def matched(self, least: int = 1) -> int:
        """Tokens of the longest n-gram at the row's end that occurred before; 0 if none did."""
        for size in range(min(MAX_NGRAM, len(self.tokens)), least - 1, -1):
            if tuple(self.tokens[-size:]) in self.followed_at:
                return size
        return 0


class Lookup(Drafter):
    """A drafter that reads nothing but its rows' pasts."""

    features = FeatureSpec(layers=(), last=False)
    session: ClassVar[type["Pasts"]]

    @abstractmethod
    def outlook(self, past: Past) -> int:
        """How much of the end of a row's past was found again: more is better, 0 is nothing."""

    @abstractmethod
    def chances_found(self, outlook: int, budget: Budget) -> tuple[float, ...]:
        """As `chances`, where something was found: `outlook` is not 0."""

    def chances_at(self, outlook: int, budget: Budget) -> tuple[float, ...]:
        """None at all where nothing was found."""
        if outlook == NO_OUTLOOK:
            return self.chances(budget)
        return self.chances_found(outlook, budget) if outlook else (0.0,) * budget.depth

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> "Pasts":
        """A session with the first tokens of prompts [B, T]; the others come with commits."""
        return self.session(self, to_host(prompts[:, 0]))


LookupDrafter = TypeVar("LookupDrafter", bound=Lookup)


class Pasts(DraftSession, Generic[LookupDrafter]):
    """A session that knows its rows' pasts: an index of n-grams, kept up to date token by token."""

    row_state = ("pasts",)

    def __init__(self, drafter: LookupDrafter, first_tokens: Sequence[int]):
        self.drafter = drafter
        self.pasts = [Past(token) for token in first_tokens]
        self.device = torch.device("cpu")

    def offers(self) -> bool:
        """Whether there is anything to propose for any row."""
        return any(self.outlook_of(past) > 0 for past in self.pasts)

    def outlook(self) -> int:
        """That of a typical row."""
        rows = self.pasts[:TYPICAL_ROWS]
        return round(sum(map(self.outlook_of, rows)) / len(rows))

    def outlook_of(self, past: Past) -> int:
        """That of one row, looked for once a step."""
        if past.outlook is None:
            past.outlook = self.drafter.outlook(past)
        return past.outlook

    def commit(self, committed: Committed) -> None:
        """Add the committed tokens to each row's past."""
        self.device = committed.tokens.device
        for past, tokens in zip(self.pasts, committed.new_tokens, strict=True):
            for token in tokens:
                past.append(token)

    def cut(self, length: int) -> None:
        """Keep the tokens at the first `length` positions and the one that follows them."""
        self.pasts = [past.first_tokens(length + 1) for past in self.pasts]
