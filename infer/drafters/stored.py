"""What a datastore and a table of n-grams have in common: n-grams as numbers, and their folder."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from drafthead.heads.errors import UserError
from drafthead.heads.storage.files import write_text

SEPARATOR = -1  # between texts, and after the last
FACTOR, OFFSET = np.uint64(1_000_003), np.uint64(7)
RECORD = "datastore.json"


@dataclass(frozen=True)
class Record:
    """What a folder is of, and how well it guesses."""

    vocabulary: str  # a hash of the tokenizer's tokens
    tokens: int
    # How often trees were accepted to depth 1, 2, ... on texts that are not in it: by outlook (see
    # `StoreLookup`, and NO_OUTLOOK for all steps), and by nodes.
    reached: dict[int, dict[int, list[float]]]
    ngrams: int = 0  # the longest n-grams of a table; 0 for a datastore

    @classmethod
    def load(cls, folder: Path, vocabulary: str) -> "Record":
        """The record in a folder.

        Raises UserError when there is none that can be read, or one of another tokenizer.
        """
        with readable(folder):
            fields = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            reached = {
                int(outlook): {int(nodes): shares for nodes, shares in sizes.items()}
                for outlook, sizes in fields["reached"].items()
            }
            ngrams = int(fields.get("ngrams", 0))
            record = cls(fields["vocabulary"], fields["tokens"], reached, ngrams)
        if record.vocabulary != vocabulary:
            raise UserError(
                f"{folder} is a datastore of another tokenizer's tokens: make one of this target's "
                "answers with `drafthead build-datastore`"
            )
        return record

    def save(self, folder: Path) -> None:
        """Write it into a folder."""
        write_text(folder / RECORD, json.dumps(asdict(self), indent=1) + "\n")


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Raises UserError for what goes wrong while files of a folder are read."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder} is no datastore that can be read ({error}): make one with "
            "`drafthead build-datastore`"
        ) from error


def mapped(path: Path) -> np.ndarray:
    """The array of a file, mapped into memory."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


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
