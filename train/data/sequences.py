"""Conversations as tokens, in memory or mapped from an Arrow file."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, overload

import numpy as np
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets

from drafthead.train.data.conversations import Writer

COLUMNS = Features(
    {
        "input_ids": List(Value("int32")),
        "supervised": List(Value("bool")),
        "length": Value("int32"),
        "num_supervised": Value("int32"),
        "digest": Value("int64"),  # of the tokens
        "prompt_digest": Value("int64"),  # of those before the first supervised one
        "category": Value("string"),  # what kind of request it is, if the row said so
    }
)


@dataclass(frozen=True)
class SupervisedTokens:
    """Token ids [T] of one rendered conversation, and which of them are supervised [T]."""

    input_ids: list[int]
    mask: list[bool]

    @property
    def teaches(self) -> bool:
        """Whether a head can learn from it: it guesses what follows an answer's first token."""
        return any(before and learnt for before, learnt in pairwise(self.mask))


@dataclass(frozen=True)
class TokenSequence:
    """One conversation as tokens."""

    input_ids: torch.Tensor  # [T] int32
    supervised: torch.Tensor  # [T] bool: which tokens are learnt


class TokenTable(Sequence[TokenSequence]):
    """Sequences of tokens in Arrow's form, in memory or in a file."""

    def __init__(
        self,
        data: Dataset,
        digest: str = "",
        writers: frozenset[Writer | None] = frozenset(),
        chosen: np.ndarray | None = None,
    ):
        """`digest` is that of all sequences; `writers` are who answered, None where unknown.

        `chosen` are the numbers of the sequences in `data` that the table has, maybe some of them
        several times; by default it has all of them once.
        """
        self.data, self.digest, self.writers = data.with_format("numpy"), digest, writers
        self.chosen = np.arange(len(data)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> TokenSequence: ...
    @overload
    def __getitem__(self, index: slice) -> "list[TokenSequence]": ...
    def __getitem__(self, index: int | slice) -> "TokenSequence | list[TokenSequence]":
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        row = self.data[int(self.chosen[index])]
        # Copies: what is mapped from a file cannot be written, and torch warns of such arrays.
        ids = torch.from_numpy(row["input_ids"].astype(np.int32))
        return TokenSequence(ids, torch.from_numpy(row["supervised"].astype(bool)))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, [n]."""
        return self._column("length")

    @cached_property
    def num_supervised(self) -> np.ndarray:
        """Supervised tokens of each sequence, [n]."""
        return self._column("num_supervised")

    @cached_property
    def digests(self) -> np.ndarray:
        """A hash of the tokens of each sequence, [n]."""
        return self._column("digest")

    @cached_property
    def prompt_digests(self) -> np.ndarray:
        """A hash of the tokens before the first supervised one, [n]."""
        return self._column("prompt_digest").view(np.uint64)

    @cached_property
    def categories(self) -> list[str | None]:
        """Return what kind of request each sequence is, where its row said so."""
        return [self.data.data.column("category")[int(n)].as_py() for n in self.chosen]

    def _column(self, name: str) -> np.ndarray:
        return self.data.data.column(name).to_numpy()[self.chosen]

    def parted(self, share: float, most: int) -> "tuple[TokenTable, TokenTable]":
        """The table in two: about `share` of the sequences, at most `most`, are in the second.

        Each is there once. All answers to one prompt go together: another answer to it would tell
        too much.
        """
        once, first = np.unique(self.chosen, return_index=True)
        digests = self.prompt_digests[first]
        limit = np.uint64(share * float(2**64))
        if np.count_nonzero(digests < limit) > most:
            limit = np.partition(digests, most)[most]
        left = self.chosen[self.prompt_digests >= limit]
        return self._part(left), self._part(once[digests < limit])

    def _part(self, chosen: np.ndarray) -> "TokenTable":
        digest = hashlib.sha256(self.digest.encode() + chosen.astype("<i8").tobytes()).hexdigest()
        return TokenTable(self.data, digest, self.writers, chosen)

    def _batches(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Some sequences after the other: tokens, masks and how often each is chosen, [T], and the
        lengths of the sequences, [n].
        """
        times, first = np.bincount(self.chosen, minlength=len(self.data)), 0
        for batch in self.data.data.to_batches():
            lengths = batch.column("length").to_numpy()
            weights = times[first : first + len(batch)].repeat(lengths)
            first += len(batch)
            ids, learnt = (batch.column(name).flatten() for name in ("input_ids", "supervised"))
            yield ids.to_numpy(), learnt.to_numpy(zero_copy_only=False), weights, lengths

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """Return how often each token is supervised, [V]."""
        counts = np.zeros(vocab_size)
        for ids, learnt, weights, _ in self._batches():
            counts += np.bincount(ids[learnt], weights[learnt], vocab_size)
        return torch.from_numpy(counts.astype(np.int64))

    def most_frequent(self) -> tuple[int, int, int]:
        """The token that answers have most often after their first one, how often, of how many.

        Whoever always guesses it is right so often.
        """
        counts: np.ndarray = np.zeros(1)
        for ids, learnt, weights, lengths in self._batches():
            guessed = learnt & np.roll(learnt, 1)
            guessed[np.cumsum(lengths) - lengths] = False  # what begins a sequence follows nothing
            found = np.bincount(ids[guessed], weights[guessed], len(counts))
            found[: len(counts)] += counts
            counts = found
        return int(counts.argmax()), int(counts.max()), int(counts.sum())


def mixed(tables: Sequence[TokenTable], weights: Sequence[float], seed: int) -> TokenTable:
    """Tables as one, each sequence of a table as often as its weight says.

    Of weight 2 every sequence is there twice, of weight 0.5 half of them, which the seed chooses.
    """
    places, first = [], 0
    for table, weight in zip(tables, weights, strict=True):
        some = random.Random(f"mix-{seed}-{first}").sample(
            range(len(table)), round(weight % 1 * len(table))
        )
        own = np.concatenate([np.tile(np.arange(len(table)), int(weight)), np.sort(some)])
        places.append(first + own.astype(np.int64))
        first += len(table)
    digest = hashlib.sha256(repr([seed, *weights, *(t.digest for t in tables)]).encode())
    return TokenTable(
        concatenate_datasets([table.data for table in tables]),
        digest.hexdigest(),
        frozenset(writer for table in tables for writer in table.writers),
        np.concatenate(places),
    )


def columns_of(rows: Sequence[SupervisedTokens], kinds: Sequence[str | None]) -> dict[str, Any]:
    """Sequences, and what kind of request each is, as COLUMNS."""
    ids = [np.asarray(row.input_ids, dtype=np.int32) for row in rows]
    masks = [np.asarray(row.mask, dtype=bool) for row in rows]
    prompts = [tokens[: int(mask.argmax())] for tokens, mask in zip(ids, masks, strict=True)]
    return {
        "input_ids": ids,
        "supervised": masks,
        "length": [len(tokens) for tokens in ids],
        "num_supervised": [int(mask.sum()) for mask in masks],
        "digest": hashes(ids),
        "prompt_digest": hashes(prompts),
        "category": kinds,
    }


def hashes(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """A hash of each sequence of tokens, [n] int64."""
    digests = [hashlib.blake2b(tokens.tobytes(), digest_size=8).digest() for tokens in sequences]
    return np.frombuffer(b"".join(digests), dtype=np.int64)


def add_to_digest(digest: "hashlib._Hash", columns: dict[str, Any]) -> None:
    """Add the tokens and masks of some sequences to the hash of all."""
    digest.update(columns["digest"].tobytes())
    digest.update(np.asarray(columns["length"], dtype=np.int32).tobytes())
    digest.update(np.packbits(np.concatenate(columns["supervised"])).tobytes())
