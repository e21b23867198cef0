"""Lookup: propose what followed the last few tokens when they occurred before.

Prompt lookup needs no model and pays where answers repeat their prompt, as in editing and
summarising (Saxena, 2023; transformers calls it `prompt_lookup_num_tokens`). `store_lookup` also
looks into what the target has written before.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.errors import UserError
from drafthead.core.host import to_host
from drafthead.core.sampling import RowRandom, Sampling, draft_distribution, sample
from drafthead.core.target.features import FeatureSpec
from drafthead.core.trees.guesses import Guesses, GuessTree
from drafthead.core.trees.recipe import Proposal
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.heads.growing.static import free_budgets

MAX_NGRAM = 3  # that the index holds; longer matches are found from these
LONGEST = 32  # tokens of a match: longer ones count as this long
# Probabilities of the next token after some tokens, at least one; their sum may be below 1.
Distribution: TypeAlias = Callable[[Sequence[int]], Mapping[int, float]]
Support: TypeAlias = tuple[list[int], list[float]]  # different tokens, and their probabilities

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

    def __init__(self, first: int):
        self.tokens = [first]
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
        """How many tokens before a place are also the row's last ones; `length` are known to be."""
        tokens, end = self.tokens, len(self.tokens)
        most = min(LONGEST, place)
        while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        return length

    def __copy__(self) -> "History":
        """A history that goes on by itself."""
        twin = History(self.tokens[0])
        twin.tokens, twin.followed_at = self.tokens.copy(), self.followed_at.copy()
        twin.match = self.match
        return twin

    def first_tokens(self, count: int) -> "History":
        """The history as it was when it had `count` tokens."""
        if count >= len(self.tokens):
            return self
        earlier = History(self.tokens[0])
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
    """How often the token after a match was right, by the length of the match.

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


class Lookup(Drafter):
    """A drafter that reads nothing but its rows' histories."""

    features = FeatureSpec(layers=(), last=False)
    names: tuple[str, ...] = ("lookup",)
    matches: MatchRecord  # how often what followed a match was right
    # What rules that draw children draw them from; most lookup has copies alone, which are chosen.
    distribution: Distribution | None = None
    most_drawn: int  # tokens of a drawn chain

    @abstractmethod
    def guess(self, past: History, nodes: int, depth: int, follows: bool = True) -> GuessTree:
        """The tree of up to `nodes` nodes, the root not counted, after a row's history.

        `follows` is whether the rule follows the target's own tokens.
        """

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> "LookupSession":
        """A session with the first tokens of prompts [B, T]; the others come with commits."""
        return LookupSession(self, to_host(prompts[:, 0]))

    def part(self, names: frozenset[str] | None) -> "Lookup":
        """What of it drafts under some of its names; None: all."""
        return self

    def learn(self, past: History) -> None:
        """A row has gained a token."""


class LookupSession(DraftSession):
    """A session that knows its rows' histories, each with an index of n-grams."""

    row_state = ("histories",)
    knows_prompt = False  # tokens of a prompt are not the target's

    def __init__(self, drafter: Lookup, first_tokens: Sequence[int]):
        self.drafter = drafter
        self.histories = [History(token) for token in first_tokens]
        self.device = torch.device("cpu")
        # Nodes and rule of the last free draft, and that, for as long as nothing was committed.
        self.last: tuple[int, bool, Guesses] | None = None

    def commit(self, committed: Committed) -> None:
        self.device = committed.tokens.device
        for past, tokens in zip(self.histories, committed.new_tokens, strict=True):
            for token in tokens:
                if self.knows_prompt and past.match is not None:
                    self.drafter.matches.add(past.match.length, past.guess == token)
                past.append(token)
                self.drafter.learn(past)
        self.knows_prompt, self.last = True, None

    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> Proposal:
        """Each row's own tree; the root alone if there is nothing to guess.

        Under rules that draw children, a chain, if there is a distribution to draw it from.
        """
        distribution = self.drafter.distribution
        if isinstance(random, RowRandom) and distribution is not None:
            texts = [past.tokens for past in self.histories]
            most = min(budget.longest, self.drafter.most_drawn)
            return drawn_chain(texts, distribution, most, sampling, random)
        follows = sampling.greedy or isinstance(random, NextDraws)
        found = self.guesses(budget, follows)
        return found.tree() if budget.depth else found

    def ask(self, drafter: Lookup) -> None:
        """Draft by another lookup of the same tokens from now on."""
        if drafter is not self.drafter:
            self.drafter, self.last = drafter, None

    def guesses(self, budget: Budget, follows: bool) -> Guesses:
        """Each row's tree within a budget; `follows` as for `Lookup.guess`."""
        if budget.depth == 0 and self.last is not None:
            nodes, like_now, found = self.last
            if nodes >= budget.nodes and like_now == follows:
                return found.best(budget.nodes)
        limits = budget.nodes - 1, budget.longest
        parts = [self.drafter.part(names) for names in self.wanted or [None] * len(self.histories)]
        pairs = zip(self.histories, parts, strict=True)
        trees = [part.guess(past, *limits, follows) for past, part in pairs]
        found = Guesses([past.tokens[-1] for past in self.histories], trees, self.device)
        if budget.depth == 0:
            self.last = budget.nodes, follows, found
        return found

    def cut(self, length: int) -> None:
        self.knows_prompt, self.last = False, None
        self.histories = [past.first_tokens(length + 1) for past in self.histories]


class PromptLookup(Lookup):
    """A chain of up to `depth` tokens copied from the row's own past."""

    def __init__(self, depth: int, least: int = 1):
        """Matches of fewer than `least` tokens do not count. Raises UserError for a depth of 0."""
        if depth < 1:
            raise UserError(f"prompt lookup must draft at least 1 token, got {depth}")
        self.least = least
        self.depth = self.most_drawn = depth
        self.budgets = free_budgets(depth + 1)
        self.matches = MatchRecord()

    def guess(self, past: History, nodes: int, depth: int, follows: bool = True) -> GuessTree:
        tokens = past.continuation(min(nodes, depth, self.depth), self.least)
        scores = self.matches.log_chances(past.matched(self.least), len(tokens))
        return GuessTree.chain(tokens, scores)


def drawn_chain(
    texts: Sequence[Sequence[int]],
    distribution: Distribution,
    depth: int,
    sampling: Sampling,
    random: RowRandom,
) -> TokenTree:
    """A chain of `depth` drawn tokens after each row's text, with what they were drawn from."""
    numbers = torch.tensor(to_host(random.uniform(depth)), dtype=torch.float64)  # [B, depth]
    rows = [list(text) for text in texts]
    supports: list[list[Support]] = [[] for _ in rows]
    for level in range(depth):
        known = [distribution(row) for row in rows]
        probs = draft_distribution(logits_of(known), sampling)
        places = sample(probs, numbers[:, level]).tolist()
        for number, (ids, place) in enumerate(zip(map(list, known), places, strict=True)):
            supports[number].append((ids, probs[number, : len(ids)].tolist()))
            rows[number].append(ids[place])
    # The last node has no children, but the tables have a row for it.
    ids_table, probs_table = support_tables([[*row, row[-1]] for row in supports])
    tokens = torch.tensor([row[-1 - depth :] for row in rows], device=random.device)
    shape, device = TreeShape.chain(depth), random.device
    return TokenTree.from_shape(shape, tokens, ids_table.to(device), probs_table.to(device))


def logits_of(known: Sequence[Mapping[int, float]]) -> torch.Tensor:
    """Logarithms of probabilities, float64 [B, k]; -inf where a row has fewer than another."""
    logs = [torch.tensor([*row.values()], dtype=torch.float64).log() for row in known]
    return pad_sequence(logs, batch_first=True, padding_value=-torch.inf)


def support_tables(
    supports: Sequence[Sequence[Support]],  # of each node of each row
) -> tuple[torch.Tensor, torch.Tensor]:  # [B, N, k] both
    """Supports of different sizes as tables; what is missing are tokens of probability 0.

    They are tokens of other supports, so that all of one support are different.
    """
    every = [support for row in supports for support in row]
    most = max(len(ids) for ids, _ in every)
    known = sorted({token for ids, _ in every for token in ids})
    ids, probs = [], []
    for own, chances in every:
        missing = most - len(own)
        others = [token for token in known if token not in own][:missing] if missing else []
        ids.append([*own, *others])
        probs.append([*chances, *[0.0] * missing])
    shape = len(supports), len(supports[0]), most
    return torch.tensor(ids).view(shape), torch.tensor(probs, dtype=torch.float64).view(shape)
