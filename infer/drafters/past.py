"""The tokens of a row so far, and what followed its last few tokens when they occurred before."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from drafthead.heads.coupling import Choice, NextDraws
from drafthead.heads.drafting.drafter import NO_OUTLOOK, Committed, Drafter, DraftSession
from drafthead.heads.host import to_host
from drafthead.heads.sampling import RowRandom, SamplingConfig
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.trees.tree import Budget, TokenTree
from drafthead.infer.drafters.drawn_chain import Distribution, drawn_chain
from drafthead.infer.drafters.guess_tree import GuessTree, token_tree
from drafthead.infer.drafters.match_record import MatchRecord

MAX_NGRAM = 3  # that the index holds; longer matches are found from these
LONGEST = 32  # tokens of a match: longer ones are not told apart
TYPICAL_ROWS = 8  # rows by which the outlook of a batch is told, because each takes time


class Match(NamedTuple):
    """An earlier occurrence of a row's last tokens."""

    place: int  # of the token that followed it
    length: int  # tokens, up to LONGEST


class Past:
    """The tokens of one row, and the longest match of its end.

    A match that the next token continues goes on, unless there is another one at least as long: the
    longer the text that was found again, the surer is what follows (suffix decoding, Oliaro et al.,
    2024, arXiv 2411.04975). New ones are found by the last occurrence of n-grams.
    """

    def __init__(self, first: int):
        self.tokens = [first]
        self.followed_at: dict[tuple[int, ...], int] = {}  # n-gram -> the token after its last one
        self.match: Match | None = None
        self.outlook: int | None = None  # of what comes next, once it was asked for

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
        self.outlook = None

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
        """How many tokens before a place are also the row's last ones; `length` are known to be."""
        tokens, end = self.tokens, len(self.tokens)
        most = min(LONGEST, place)
        while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        return length

    def __copy__(self) -> "Past":
        """A past that goes on by itself."""
        twin = Past(self.tokens[0])
        twin.tokens, twin.followed_at = self.tokens.copy(), self.followed_at.copy()
        twin.match = self.match
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


class Lookup(Drafter):
    """A drafter that reads nothing but its rows' pasts."""

    features = FeatureSpec(layers=(), last=False)
    matches: MatchRecord  # how often what followed a match was right
    # What rules that draw children draw them from; most lookup has copies alone, which are chosen.
    distribution: Distribution | None = None

    @abstractmethod
    def guess(self, past: Past, nodes: int, depth: int, follows: bool = True) -> GuessTree:
        """The tree of up to `nodes` nodes, the root not counted, after a row's past.

        `follows` is whether the rule follows the target's own tokens.
        """

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
        return Pasts(self, to_host(prompts[:, 0]))

    def learn(self, past: Past) -> None:
        """A row has gained a token."""


class Pasts(DraftSession):
    """A session that knows its rows' pasts: an index of n-grams, kept up to date token by token."""

    row_state = ("pasts",)
    knows_prompt = False  # tokens of a prompt are not the target's

    def __init__(self, drafter: Lookup, first_tokens: Sequence[int]):
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
                if self.knows_prompt and past.match is not None:
                    self.drafter.matches.add(past.match.length, past.guess == token)
                past.append(token)
                self.drafter.learn(past)
        self.knows_prompt = True

    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """Each row's own tree; the root alone if there is nothing to guess.

        Under rules that draw children, a chain, if there is a distribution to draw it from.
        """
        distribution = self.drafter.distribution
        if isinstance(random, RowRandom) and distribution is not None:
            texts = [past.tokens for past in self.pasts]
            return drawn_chain(texts, distribution, budget.depth, sampling, random)
        follows = sampling.greedy or isinstance(random, NextDraws)
        trees = self.guesses(budget, follows)
        return token_tree([past.tokens[-1] for past in self.pasts], trees, self.device)

    def guesses(self, budget: Budget, follows: bool) -> list[GuessTree]:
        """Each row's tree within a budget; `follows` as for `Lookup.guess`."""
        limits = budget.nodes - 1, budget.depth
        return [self.drafter.guess(past, *limits, follows) for past in self.pasts]

    def cut(self, length: int) -> None:
        """Keep the tokens at the first `length` positions and the one that follows them."""
        self.knows_prompt = False
        self.pasts = [past.first_tokens(length + 1) for past in self.pasts]
