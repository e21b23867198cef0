"""Conversations as packed rows of tokens, and which rows an optimiser step reads.

Everything depends on the seed and the step alone: a resumed run continues from its step, and the
number of processes changes nothing.
"""

import bisect
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafthead.heads.objectives.batch import HeadBatch
from drafthead.train.data.sequences import TokenSequence, TokenTable

PACKING_WINDOW = 1024  # conversations that are packed together


@dataclass(frozen=True)
class PackedData:
    """Conversations and the rows that they share."""

    sequences: TokenTable
    rows: tuple[tuple[int, ...], ...]  # indices of the sequences of each row

    def batch(self, rows: Sequence[int]) -> HeadBatch:
        """The given rows as right-padded tensors [B, T]."""
        return collate([[self.sequences[i] for i in self.rows[row]] for row in rows])

    def supervised_in(self, rows: Sequence[int]) -> int:
        """Number of supervised tokens in the given rows."""
        counts = self.sequences.num_supervised
        return sum(int(counts[i]) for row in rows for i in self.rows[row])

    @property
    def supervised_tokens(self) -> int:
        """Number of supervised tokens."""
        return int(self.sequences.num_supervised.sum())

    def row_length(self, row: int) -> int:
        """Number of tokens in a row."""
        return sum(int(self.sequences.lengths[i]) for i in self.rows[row])

    def fingerprint(self) -> str:
        """A hash of tokens, masks and packing, to notice data that changed between runs."""
        digest = hashlib.sha256(repr(self.rows).encode())
        digest.update(self.sequences.digest.encode())
        return digest.hexdigest()[:16]


def pack_sequences(sequences: TokenTable, max_length: int, seed: int) -> PackedData:
    """Pack sequences of at most `max_length` tokens into rows of that length."""
    return PackedData(sequences, pack(sequences.lengths.tolist(), max_length, seed))


def pack(lengths: Sequence[int], max_length: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Put sequences of the given lengths into rows of `max_length` tokens; indices of each row.

    Best fit, longest first, within windows of a shuffled order, so that a row mixes conversations
    from all parts of the data. Lengths 5, 4, 3, 2 in rows of 7 make the rows (5, 2) and (4, 3).
    """
    order = list(range(len(lengths)))
    random.Random(f"pack-{seed}").shuffle(order)
    rows: list[list[int]] = []
    for start in range(0, len(order), PACKING_WINDOW):
        window = sorted(order[start : start + PACKING_WINDOW], key=lambda i: -lengths[i])
        spaces: list[tuple[int, int]] = []  # (free tokens, row), in ascending order
        for index in window:
            place = bisect.bisect_left(spaces, (lengths[index], -1))
            if place < len(spaces):
                space, row = spaces.pop(place)
            else:
                space, row = max_length, len(rows)
                rows.append([])
            rows[row].append(index)
            bisect.insort(spaces, (space - lengths[index], row))
    return tuple(map(tuple, rows))


def collate(rows: Sequence[Sequence[TokenSequence]]) -> HeadBatch:
    """Rows of sequences as right-padded tensors [B, T]."""
    longest = max(sum(len(sequence.input_ids) for sequence in row) for row in rows)
    input_ids = torch.zeros(len(rows), longest, dtype=torch.long)
    segments = torch.zeros(len(rows), longest, dtype=torch.long)
    supervised = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, row in enumerate(rows):
        start = 0
        for number, sequence in enumerate(row, 1):
            end = start + len(sequence.input_ids)
            input_ids[index, start:end] = sequence.input_ids
            segments[index, start:end] = number
            supervised[index, start:end] = sequence.supervised
            start = end
    return HeadBatch(input_ids, segments, supervised)


class RowOrder:
    """The endless stream of rows: one permutation per epoch, without gaps between epochs.

    With 5 rows and steps of 2, step 2 reads the last row of the first epoch and the first row of
    the second.
    """

    def __init__(self, num_rows: int, batch_rows: int, seed: int):
        self.num_rows, self.batch_rows, self.seed = num_rows, batch_rows, seed
        self._epoch, self._permutation = -1, [0] * num_rows

    def rows_of_step(self, step: int) -> list[int]:
        """The `batch_rows` rows of a step, steps counted from 0."""
        first = step * self.batch_rows
        return [self._row_at(place) for place in range(first, first + self.batch_rows)]

    def _row_at(self, place: int) -> int:
        epoch, offset = divmod(place, self.num_rows)
        if epoch != self._epoch:
            permutation = list(range(self.num_rows))
            random.Random(f"{self.seed}-{epoch}").shuffle(permutation)
            self._epoch, self._permutation = epoch, permutation
        return self._permutation[offset]
