"""Text that a target has written before, and an index of what followed each few tokens of it.

Retrieval instead of a draft model (REST, He et al., 2023, arXiv 2311.08252): a model that answers
many similar requests has mostly written before what it is about to write. Every n-gram of a few
lengths is a number, and the sorted numbers with their places are files that are mapped into memory,
so that a look-up is two searches.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

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

# Lengths of n-grams, and how much what follows one of them counts against what follows the others.
LEVELS = {6: 1.0, 4: 0.4, 3: 0.15, 2: 0.05}
MATCHES = 32  # places that a guess is made of; longer n-grams go first
DEPTH = 10  # tokens after a place that are read
TOKENS = "tokens.npy"


class Datastore:
    """A folder of tokens and their n-grams, or the same in memory."""

    def __init__(
        self,
        tokens: np.ndarray,  # [N] int32, texts with a separator after each, and DEPTH at the end
        hashes: dict[int, np.ndarray],  # by length: numbers of the n-grams, sorted
        places: dict[int, np.ndarray],  # by length: where the token after each n-gram is
        record: Record,
    ):
        self.tokens, self.hashes, self.places, self.record = tokens, hashes, places, record

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]], vocabulary: str) -> "Datastore":
        """A datastore in memory of the token ids of texts."""
        there = joined(texts)
        tokens = np.concatenate([there, np.full(DEPTH, SEPARATOR, dtype=np.int32)])
        hashes, places = {}, {}
        for length in LEVELS:
            numbers = ngram_numbers(tokens, length)
            order = np.argsort(numbers, kind="stable")
            hashes[length] = numbers[order]
            places[length] = (order + length).astype(np.uint32 if len(tokens) < 1 << 32 else int)
        count = int((there != SEPARATOR).sum())
        return cls(tokens, hashes, places, Record(vocabulary, count, {}))

    @classmethod
    def load(cls, folder: Path, record: Record) -> "Datastore":
        """The datastore in a folder with this record, mapped into memory.

        Raises UserError when its tables cannot be read.
        """
        with readable(folder):
            tokens, *others = [mapped(folder / name) for name in table_names()]
        hashes, places = others[: len(LEVELS)], others[len(LEVELS) :]
        if len(tokens) < DEPTH or [*map(len, hashes)] != [*map(len, places)]:
            raise UserError(f"{folder} is damaged: make the datastore again")
        return cls(
            tokens,
            dict(zip(LEVELS, hashes, strict=True)),
            dict(zip(LEVELS, places, strict=True)),
            record,
        )

    def save(self, folder: Path) -> None:
        """Write all files into a folder."""
        tables = [self.tokens, *self.hashes.values(), *self.places.values()]
        for name, table in zip(table_names(), tables, strict=True):
            np.save(folder / name, table)
        self.record.save(folder)

    def continuations(self, past: Sequence[int]) -> Iterator[tuple[float, list[int]]]:
        """Weights and texts of up to `DEPTH` tokens that followed what `past` ends with.

        Of the places after the longest n-gram there are up to `MATCHES`, evenly spread over all;
        places after shorter ones make up the number. A text may go on beyond a separator.
        """
        found = 0
        for length, weight in LEVELS.items():
            if length > len(past):
                continue
            places = self._places_after(past, length)
            if not len(places):
                continue
            if len(places) > MATCHES:
                places = places[np.linspace(0, len(places) - 1, MATCHES).astype(int)]
            # A damaged file may hold any number.
            first = np.minimum(places.astype(int), len(self.tokens) - DEPTH)
            texts = self.tokens[first[:, None] + np.arange(DEPTH)].tolist()
            for text in texts:
                yield weight / len(texts), text
            found += len(texts)
            if found >= MATCHES:
                return

    def matched(self, past: Sequence[int]) -> int:
        """Tokens of the longest n-gram at the end of `past` that the texts hold; 0 for none."""
        for length in LEVELS:
            if length <= len(past) and len(self._places_after(past, length)):
                return length
        return 0

    def _places_after(self, past: Sequence[int], length: int) -> np.ndarray:
        """The places [m] after the n-gram of a length with which the past ends."""
        number = np.uint64(ngram_number(past[-length:]))
        sorted_numbers = self.hashes[length]
        first = sorted_numbers.searchsorted(number, "left")
        return self.places[length][first : sorted_numbers.searchsorted(number, "right")]


def table_names() -> list[str]:
    """The files of a datastore beside its record."""
    kinds = ("hashes", "places")
    return [TOKENS, *(f"{kind}-{length}.npy" for kind in kinds for length in LEVELS)]
