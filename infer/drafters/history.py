"""The tokens of a row, what its end matches, and how often what follows a match is right."""

import math
from itertools import accumulate
from typing import NamedTuple

MAX_NGRAM = 3  # that the index holds; longer matches are found from these
LONGEST = 32  # tokens of a match: longer ones count as this long

# What is believed of matches at first: the share of tokens that were right after matches of 1, 2,
# ... tokens in SmolLM2-135M's answers, by benchmarks/matches.py. Longer ones count as the last.
FIRST_SHARES = (
    *(0.21, 0.53, 0.60, 0.69, 0.73, 0.77, 0.80, 0.83, 0.84, 0.86, 0.87, 0.88, 0.89, 0.90, 0.90),
    *(0.91, 0.92, 0.92, *(0.93,) * 4, *(0.94,) * 7, 0.96, 0.96, 0.98),
)  # fmt: skip
FIRST_WEIGHT = 20.0  # tokens that the first belief counts as
MEMORY = 500  # tokens after matches of a length by which it is judged: what is older fades


class Match(NamedTuple):
    """An earlier occurrence of a row's last tokens."""

    place: int  # of the token that followed it
    length: int  # tokens, up to LONGEST


class History:
    """The tokens of one row, and the longest match of its end.

    A match that the next token continues goes on, unless there is another one at least as long: the
    longer the text that was found again, the surer is what follows (suffix decoding, Oliaro et al.,
    2024, arXiv 2411.04975). New ones are found by the last occurrence of n-grams.
    """

    def __init__(self, first: int, salt: str = ""):
        """`salt` is of the request, see `Committed`."""
        self.tokens, self.salt = [first], salt
        self.text = self.tokens  # of the row, which is not to be found elsewhere
        self.followed_at: dict[tuple[int, ...], int] = {}  # n-gram -> the token after its last one
        self.match: Match | None = None

    def append(self, token: int) -> None:
        """Add a token: it follows every n-gram that ends just before it."""
        place, goes_on = len(self.tokens), None
        if self.match is not None and self.guess == token:
            goes_on = Match(self.match.place + 1, min(self.match.length + 1, LONGEST))
        for size in range(1, min(MAX_NGRAM, place) + 1):
            self.followed_at[tuple(self.tokens[place - size :])] = place
        self.tokens.append(token)
        last = self._last_occurrence()
        longer = goes_on is not None and (last is None or goes_on.length > last.length)
        self.match = goes_on if longer else last

    @property
    def guess(self) -> int | None:
        """The token that followed the match, None without one."""
        return None if self.match is None else self.tokens[self.match.place]

    def _last_occurrence(self) -> Match | None:
        """The last occurrence of the longest n-gram of the index that the row ends with."""
        for size in range(min(MAX_NGRAM, len(self.tokens)), 0, -1):
            place = self.followed_at.get(tuple(self.tokens[-size:]))
            if place is not None:
                return Match(place, self._common(place, size))
        return None

    def _common(self, place: int, length: int) -> int:
        """The number of tokens before a place that are the row's last; `length` are known to be."""
        tokens, end = self.tokens, len(self.tokens)
        most = min(LONGEST, place)
        while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        return length

    def __copy__(self) -> "History":
        """A history that goes on by itself."""
        twin = History(self.tokens[0], self.salt)
        twin.tokens, twin.followed_at = self.tokens.copy(), self.followed_at.copy()
        twin.text = twin.tokens
        twin.match = self.match
        return twin

    def ahead(self, tokens: list[int]) -> "History":
        """The history as if it went on with these tokens; it is read, and never added to."""
        if not tokens:
            return self
        later = History(self.tokens[0], self.salt)
        later.tokens, later.followed_at = [*self.tokens, *tokens], self.followed_at
        later.text = self.text
        later.match = later._last_occurrence()
        return later

    def first_tokens(self, count: int) -> "History":
        """The history as it was when it had `count` tokens."""
        if count >= len(self.tokens):
            return self
        earlier = History(self.tokens[0], self.salt)
        for token in self.tokens[1:count]:
            earlier.append(token)
        return earlier

    def continuation(self, count: int, least: int = 1) -> list[int]:
        """`count` tokens, or none, that followed the match.

        Matches of fewer than `least` tokens do not count. In ``a b c d a b`` the last two tokens
        were followed by ``c d a b`` before. What follows those is not there yet: it is taken to be
        what followed them before, so the text goes on in a circle, ``c d a b c d``.
        """
        if self.match is None or self.match.length < least:
            return []
        place = self.match.place
        found = self.tokens[place : place + count]
        return [found[i % len(found)] for i in range(count)]

    def matched(self, least: int = 1) -> int:
        """Tokens of the match; 0 if there is none of at least `least`."""
        length = 0 if self.match is None else self.match.length
        return length if length >= least else 0


class MatchRecord:
    """The share of matches whose next token was right, by the length of the match.

    Learns from every token that is committed after a match, drafted or not."""

    def __init__(self) -> None:
        self.seen = [FIRST_WEIGHT] * len(FIRST_SHARES)
        self.right = [FIRST_WEIGHT * share for share in FIRST_SHARES]
        self.logs = [math.log(self.share(1 + place)) for place in range(len(self.seen))]

    def add(self, length: int, was_right: bool) -> None:
        """A token came after a match of so many tokens."""
        place = min(length, len(self.seen)) - 1
        keep = 1 - 1 / MEMORY
        self.seen[place] = keep * self.seen[place] + 1
        self.right[place] = keep * self.right[place] + was_right
        self.logs[place] = math.log(self.share(length))

    def share(self, length: int) -> float:
        """The share of right tokens after matches of a length; never 0 or 1."""
        place = min(length, len(self.seen)) - 1
        return (self.right[place] + 0.5) / (self.seen[place] + 1)

    def log_chances(self, length: int, count: int) -> list[float]:
        """Logarithms of how likely 1, 2, ... `count` tokens after a match are all right.

        Each right one makes the match longer: after 4 tokens with shares 1/2 for 4 and 3/4 for 5,
        the chances of one and two tokens are 1/2 and 3/8.
        """
        first = min(length, len(self.logs)) - 1
        logs = self.logs[first : first + count]
        return list(accumulate([*logs, *[self.logs[-1]] * (count - len(logs))]))
