"""What followed each few tokens of a target's texts, counted: a language model without a network.

The trivial drafts of Leviathan et al. (2023, arXiv 2211.17192): unigrams, bigrams, trigrams and so
on. A datastore keeps the texts and so knows a few whole continuations; a table forgets them and
counts every token, so what followed rarely after these words, but often after the last of them, has
its probability.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from drafthead.heads.errors import UserError
from drafthead.infer.drafters.stored import (
    SEPARATOR,
    Record,
    joined,
    mapped,
    ngram_number,
    ngram_numbers,
    readable,
)

# Tokens of the longest n-grams, the next one included. More are no use: of 2.2 million tokens most
# longer contexts were seen once, and n-grams of 7 guessed worse than those of 5.
ORDERS = range(2, 6)
FOLLOWERS = 64  # of one context, the most frequent ones
CHILDREN = 8  # of a node of a tree; twice as many bring 0.2 % more in trees of 16, and take longer
KINDS = ("numbers", "spans", "followers")


class Contexts(NamedTuple):
    """All contexts of one length, by the number of their n-gram, and what followed them."""

    numbers: np.ndarray  # [C] uint64, sorted
    # [C + 1, 3]: where their followers begin, how many tokens followed, and how many different ones
    spans: np.ndarray
    followers: np.ndarray  # [F, 2] tokens and how often, the most frequent first

    @classmethod
    def of(cls, tokens: np.ndarray, length: int) -> "Contexts":
        """Count what followed each `length` tokens of texts [N] with separators.

        Of texts ``a b a c`` and ``a b`` the context ``a`` has three followers of two kinds: b
        twice, then c.
        """
        numbers, following = followed(tokens, length)
        order = np.lexsort((following, numbers))
        first, counts = runs(numbers[order], following[order])
        numbers, following = numbers[order][first], following[order][first]
        order = np.lexsort((-counts, numbers))
        numbers, following, counts = numbers[order], following[order], counts[order]
        first, kinds = runs(numbers)
        rank = np.arange(len(numbers)) - np.repeat(first, kinds)
        kept = rank < FOLLOWERS
        starts = np.concatenate([[0], np.minimum(kinds, FOLLOWERS).cumsum()])
        seen = np.add.reduceat(counts, first) if len(first) else first
        spans = np.stack([starts, [*seen, 0], [*kinds, 0]], axis=1).astype(np.uint32)
        return cls(numbers[first], spans, np.stack([following, counts], 1)[kept].astype(np.int32))

    @property
    def fit(self) -> bool:
        """Whether the tables can be of each other, which those of a damaged file are not."""
        rows, shape = len(self.numbers), self.spans.shape
        return shape == (rows + 1, 3) and self.followers.shape == (int(self.spans[-1, 0]), 2)

    def after(self, context: Sequence[int]) -> tuple[list[list[int]], int, int] | None:
        """Followers and their counts, how many tokens followed, how many kinds; None if unseen."""
        number = np.uint64(ngram_number(context))
        place = int(self.numbers.searchsorted(number))
        if place == len(self.numbers) or self.numbers[place] != number:
            return None
        (start, seen, kinds), (end, _, _) = self.spans[place : place + 2].tolist()
        return self.followers[start:end].tolist(), seen, kinds


def followed(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of each context of a length in texts [N], and the token after it, both [n].

    Contexts and tokens of different texts do not meet: of ``a b | c`` and length 1 there is one.
    """
    padded = np.pad(tokens, (0, length + 1), constant_values=SEPARATOR)
    windows = np.lib.stride_tricks.sliding_window_view(padded, length + 1)  # [N + 1, length + 1]
    whole = (windows != SEPARATOR).all(1)
    return ngram_numbers(padded, length)[: len(windows)][whole], windows[whole, -1]


def runs(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of equal entries begin in sorted columns [n], and how long they are.

    Of 3 3 5 these are 0 2, and 2 1.
    """
    new = np.ones(len(columns[0]), dtype=bool)
    new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    first = np.flatnonzero(new)
    return first, np.diff(np.append(first, len(new)))


class NgramTable:
    """Counts of n-grams with back-off, in memory or in files that are mapped into it."""

    def __init__(self, contexts: Sequence[Contexts], record: Record):
        """`contexts` of 0, 1, 2, ... tokens; those of 0 tokens are what unigrams are."""
        self.contexts, self.record = contexts, record

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]], vocabulary: str, order: int) -> "NgramTable":
        """The table of texts' token ids with n-grams of up to `order` tokens, one of ORDERS."""
        tokens = joined(texts)
        record = Record(vocabulary, int((tokens != SEPARATOR).sum()), {}, order)
        return cls([Contexts.of(tokens, length) for length in range(order)], record)

    @classmethod
    def load(cls, folder: Path, record: Record) -> "NgramTable":
        """The table in a folder with this record, mapped into memory.

        Raises UserError when its files cannot be read.
        """
        with readable(folder):
            contexts = [
                Contexts(*(mapped(folder / f"{kind}-{length}.npy") for kind in KINDS))
                for length in range(record.ngrams)
            ]
        if record.ngrams not in ORDERS or not all(each.fit for each in contexts):
            raise UserError(f"{folder} is damaged: make the datastore again")
        return cls(contexts, record)

    def save(self, folder: Path) -> None:
        """Write all files into a folder."""
        for length, contexts in enumerate(self.contexts):
            for kind, table in zip(KINDS, contexts, strict=True):
                np.save(folder / f"{kind}-{length}.npy", table)
        self.record.save(folder)

    def matched(self, past: Sequence[int]) -> int:
        """Tokens of the longest context at the end of `past` that was seen; 0 for none."""
        for length in range(min(len(self.contexts) - 1, len(past)), 0, -1):
            if self.contexts[length].after(past[-length:]) is not None:
                return length
        return 0

    def distribution(self, past: Sequence[int], enough: int = FOLLOWERS) -> dict[int, float]:
        """Probabilities of the next token, the most probable ones first, up to `enough`.

        Witten and Bell's smoothing (1991): after a context that was followed by `seen` tokens of
        `kinds` kinds, x has (count(x) + kinds x p(x)) / (seen + kinds), where p is the same after
        the context without its first token. What is known of shorter contexts is left out as soon
        as there are `enough` tokens, and below unigrams there is nothing, so the sum is below 1.
        """
        probs: dict[int, float] = {}
        left = 1.0  # probability that is for shorter contexts
        for length in range(min(len(self.contexts) - 1, len(past)), -1, -1):
            found = self.contexts[length].after(past[len(past) - length :])
            if found is None:
                continue
            followers, seen, kinds = found
            share = left / (seen + kinds)
            for token, count in followers:
                probs[token] = probs.get(token, 0.0) + share * count
            left = share * kinds
            if len(probs) >= enough:
                break
        best = sorted(probs.items(), key=lambda entry: -entry[1])
        return dict(best[:enough])

    def after(self, past: Sequence[int]) -> "Expected":
        """The root of the tree of all that may follow."""
        return Expected(self, past, 1.0)


class Expected:
    """A text that may follow, and how probable it is; what follows it is looked up when asked."""

    def __init__(self, table: NgramTable, past: Sequence[int], weight: float):
        """`past` are a row's tokens and those that are expected after it."""
        self.table, self.weight = table, weight
        self.past = past[-(len(table.contexts) - 1) :]  # a longer context was not counted

    @cached_property
    def children(self) -> Mapping[int, "Expected"]:
        """What may come next, by token."""
        return {
            token: Expected(self.table, [*self.past, token], self.weight * chance)
            for token, chance in self.table.distribution(self.past, CHILDREN).items()
        }
