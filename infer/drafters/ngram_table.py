"""Counts of what followed each few tokens of a target's texts: a model without a network.

The trivial drafts of Leviathan et al. (2023, arXiv 2211.17192): unigrams, bigrams, trigrams and so
on. Every token is counted, so what followed rarely after these words, but often after the last of
them, has its probability. The tables are files that are mapped into memory.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_json

# Tokens of the longest n-grams, the next one included. More are no use: of 2.2 million tokens most
# longer contexts were seen once, and n-grams of 7 guessed worse than those of 5.
ORDERS = range(2, 6)
FOLLOWERS = 64  # of one context, the most frequent ones
CHILDREN = 8  # of a node of a tree; twice as many bring 0.2 % more in trees of 16, and take longer
KINDS = ("numbers", "spans", "followers")
SEPARATOR = -1  # between texts, and after the last
FACTOR, OFFSET = np.uint64(1_000_003), np.uint64(7)
RECORD = "datastore.json"  # the name that older tables have


@dataclass(frozen=True)
class TableRecord:
    """The description of a folder's table."""

    vocabulary: str  # a hash of the tokenizer's tokens
    tokens: int
    ngrams: int  # tokens of the longest n-grams

    @classmethod
    def load(cls, folder: Path, vocabulary: str) -> "TableRecord":
        """The record in a folder.

        Raises UserError when there is none that can be read, or one of another tokenizer.
        """
        with readable(folder):
            fields = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            record = cls(fields["vocabulary"], fields["tokens"], int(fields.get("ngrams", 0)))
        if not record.ngrams:
            raise UserError(
                f"{folder} is an index of whole texts, as older versions wrote them: make a "
                "table of n-grams of the same answers with `drafthead data index`"
            )
        if record.vocabulary != vocabulary:
            raise UserError(
                f"{folder} is a table of n-grams of another tokenizer's tokens: make one of this "
                "target's answers with `drafthead data index`"
            )
        return record

    def save(self, folder: Path) -> None:
        """Write it into a folder."""
        write_json(folder / RECORD, asdict(self))


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Raises UserError for what goes wrong while files of a folder are read."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder} is no table of n-grams that can be read ({error}): make one with "
            "`drafthead data index`"
        ) from error


def mapped(path: Path) -> np.ndarray:
    """The array of a file, mapped into memory."""
    # As a plain array: a `memmap` takes four times as long to cut.
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)


def joined(texts: Iterable[Sequence[int]]) -> np.ndarray:
    """The token ids of texts [N] int32, with a separator after each text."""
    end = np.full(1, SEPARATOR, dtype=np.int32)
    parts = [part for text in texts for part in (np.asarray(text, dtype=np.int32), end)]
    return np.concatenate(parts) if parts else end[:0]


def ngram_numbers(tokens: np.ndarray, length: int) -> np.ndarray:
    """A number for each of the n-grams of a length in tokens [N], [N - length + 1] uint64.

    Two n-grams with one number are too rare to matter: they cost a guess.
    """
    count = len(tokens) - length + 1
    numbers = np.zeros(max(count, 0), dtype=np.uint64)
    for start in range(length):
        numbers = numbers * FACTOR + tokens[start : start + count].astype(np.uint64) + OFFSET
    return numbers


def ngram_number(tokens: Sequence[int]) -> int:
    """The number of one n-gram, as `ngram_numbers` has it; NumPy is slow with a few numbers."""
    number = 0
    for token in tokens:
        number = (number * int(FACTOR) + token + int(OFFSET)) & 0xFFFF_FFFF_FFFF_FFFF
    return number


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

    def after(
        self, context: Sequence[int], most: int = FOLLOWERS
    ) -> tuple[list[list[int]], int, int] | None:
        """Up to `most` followers with their counts, tokens that followed, how many kinds of them;
        None for a context that was not seen.
        """
        number = np.uint64(ngram_number(context))
        place = int(self.numbers.searchsorted(number))
        if place == len(self.numbers) or self.numbers[place] != number:
            return None
        (start, seen, kinds), (end, _, _) = self.spans[place : place + 2].tolist()
        return self.followers[start : min(end, start + most)].tolist(), seen, kinds


def followed(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of each context of a length in texts [N], and the token after it, both [n].

    Contexts and tokens of different texts do not meet: of ``a b | c`` and length 1 there is one.
    """
    padded = np.pad(tokens, (0, length + 1), constant_values=SEPARATOR)
    windows = np.lib.stride_tricks.sliding_window_view(padded, length + 1)  # [N + 1, length + 1]
    whole = (windows != SEPARATOR).all(1)
    return ngram_numbers(padded, length)[: len(windows)][whole], windows[whole, -1]


def runs(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The beginnings of runs of equal entries in sorted columns [n], and their lengths.

    Of 3 3 5 these are 0 2, and 2 1.
    """
    new = np.ones(len(columns[0]), dtype=bool)
    new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    first = np.flatnonzero(new)
    return first, np.diff(np.append(first, len(new)))


class NgramTable:
    """Counts of n-grams with back-off, in memory or in files that are mapped into it."""

    def __init__(self, contexts: Sequence[Contexts], record: TableRecord):
        """`contexts` of 0, 1, 2, ... tokens; those of 0 tokens are what unigrams are."""
        self.contexts, self.record = contexts, record

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]], vocabulary: str, order: int) -> "NgramTable":
        """The table of texts' token ids with n-grams of up to `order` tokens, one of ORDERS."""
        tokens = joined(texts)
        record = TableRecord(vocabulary, int((tokens != SEPARATOR).sum()), order)
        return cls([Contexts.of(tokens, length) for length in range(order)], record)

    @classmethod
    def load(cls, folder: Path, record: TableRecord) -> "NgramTable":
        """The table in a folder with this record, mapped into memory.

        Raises UserError when its files cannot be read.
        """
        with readable(folder):
            contexts = [
                Contexts(*(mapped(folder / f"{kind}-{length}.npy") for kind in KINDS))
                for length in range(record.ngrams)
            ]
        if record.ngrams not in ORDERS or not all(each.fit for each in contexts):
            raise UserError(f"{folder} is damaged: make the table again")
        return cls(contexts, record)

    def save(self, folder: Path) -> None:
        """Write all files into a folder."""
        for length, contexts in enumerate(self.contexts):
            for kind, table in zip(KINDS, contexts, strict=True):
                np.save(folder / f"{kind}-{length}.npy", table)
        self.record.save(folder)

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
            found = self.contexts[length].after(past[len(past) - length :], enough)
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
        """The tokens that may come next."""
        return {
            token: Expected(self.table, [*self.past, token], self.weight * chance)
            for token, chance in self.table.distribution(self.past, CHILDREN).items()
        }
