"""Text that a target has written before, and an index of what followed each few tokens of it.

Retrieval instead of a draft model (REST, He et al., 2023, arXiv 2311.08252): a model that answers
many similar requests has mostly written before what it is about to write. Every n-gram of a few
lengths is a number, and the sorted numbers with their places are files that are mapped into memory,
so that a look-up is two searches.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from drafthead.heads.errors import UserError
from drafthead.heads.files import write_text

# Lengths of n-grams, and how much what follows one of them counts against what follows the others.
LEVELS = {6: 1.0, 4: 0.4, 3: 0.15, 2: 0.05}
MATCHES = 32  # places that a guess is made of; longer n-grams go first
DEPTH = 10  # tokens after a place that are read
SEPARATOR = -1  # between texts, and after the last
FACTOR, OFFSET = np.uint64(1_000_003), np.uint64(7)
RECORD, TOKENS = "datastore.json", "tokens.npy"


@dataclass(frozen=True)
class Record:
    """What a datastore is of, and how well it guesses."""

    vocabulary: str  # a hash of the tokenizer's tokens
    tokens: int
    # How often trees were accepted to depth 1, 2, ... on texts that are not in it: by outlook (see
    # `StoreLookup`, and NO_OUTLOOK for all steps), and by nodes.
    reached: dict[int, dict[int, list[float]]]


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
        end = np.full(1, SEPARATOR, dtype=np.int32)
        parts = [part for text in texts for part in (np.asarray(text, dtype=np.int32), end)]
        tokens = np.concatenate([*parts, np.repeat(end, DEPTH)])
        hashes, places = {}, {}
        for length in LEVELS:
            numbers = ngram_numbers(tokens, length)
            order = np.argsort(numbers, kind="stable")
            hashes[length] = numbers[order]
            places[length] = (order + length).astype(np.uint32 if len(tokens) < 1 << 32 else int)
        count = len(tokens) - DEPTH - len(parts) // 2
        return cls(tokens, hashes, places, Record(vocabulary, count, {}))

    @classmethod
    def load(cls, folder: Path, vocabulary: str) -> "Datastore":
        """The datastore in a folder, mapped into memory.

        Raises UserError when there is none that can be read, or when it is of another tokenizer.
        """
        try:
            fields = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            reached = {
                int(outlook): {int(nodes): shares for nodes, shares in sizes.items()}
                for outlook, sizes in fields["reached"].items()
            }
            record = Record(fields["vocabulary"], fields["tokens"], reached)
            tables = [mapped(folder / name) for name in table_names()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{folder} is no datastore that can be read ({error}): make one with "
                "`drafthead build-datastore`"
            ) from error
        if record.vocabulary != vocabulary:
            raise UserError(
                f"{folder} is a datastore of another tokenizer's tokens: make one of this target's "
                "answers with `drafthead build-datastore`"
            )
        tokens, *others = tables
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
        write_text(folder / RECORD, json.dumps(asdict(self.record), indent=1) + "\n")

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


def table_names() -> list[str]:
    """The files of a datastore beside its record."""
    kinds = ("hashes", "places")
    return [TOKENS, *(f"{kind}-{length}.npy" for kind in kinds for length in LEVELS)]


def mapped(path: Path) -> np.ndarray:
    """The array of a file, mapped into memory."""
    return np.load(path, mmap_mode="r", allow_pickle=False)
