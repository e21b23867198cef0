"""The host's account of a batch: what each row has said, and which rows go on."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Row:
    """One prompt's answer so far."""

    limit: int  # most new tokens
    tokens: list[int] = field(default_factory=list)
    finished: bool = False  # an end token was reached
    accept_lengths: list[int] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """Whether the row needs more tokens."""
        return not self.finished and len(self.tokens) < self.limit

    def take(self, committed: Sequence[int], end_ids: frozenset[int]) -> list[int]:
        """Append committed tokens up to the first end token or the limit; returns those kept."""
        kept = list(committed[: self.limit - len(self.tokens)])
        for place, token in enumerate(kept):
            if token in end_ids:
                kept = kept[: place + 1]
                self.finished = True
                break
        self.tokens += kept
        return kept


class Batch:
    """Rows in the order of the prompts, and which of them stand in the running batch."""

    def __init__(self, limits: Sequence[int], end_ids: frozenset[int]):
        self.rows = [Row(limit) for limit in limits]
        self.end_ids = end_ids
        self.running = list(range(len(limits)))  # row numbers, by place in the running batch

    def running_rows(self) -> list[Row]:
        """The rows of the running batch, in its order."""
        return [self.rows[number] for number in self.running]

    def take(self, committed: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Give each running row its committed tokens; returns what was kept, by row number."""
        return {
            number: self.rows[number].take(tokens, self.end_ids)
            for number, tokens in zip(self.running, committed, strict=True)
        }

    def take_step(self, committed: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """`take` for a verification step, whose accept lengths are recorded."""
        for number, tokens in zip(self.running, committed, strict=True):
            self.rows[number].accept_lengths.append(len(tokens))
        return self.take(committed)

    def drop_inactive(self) -> list[int] | None:
        """Shrink the running batch to its active rows.

        Returns the places that stay, in the batch as it was; None when all of them do.
        """
        places = [p for p, number in enumerate(self.running) if self.rows[number].active]
        if len(places) == len(self.running):
            return None
        self.running = [self.running[place] for place in places]
        return places
