"""Reading committed tokens late: only when a drafter is to propose.

A step without a proposal should cost what plain decoding costs, so drafters only collect what was
committed, and read all of it in one pass before their next proposal.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Self

import torch

from drafthead.core.drafting.drafter import Committed, DraftSession
from drafthead.core.host import to_host
from drafthead.core.kv_cache.column_cache import FreshMemory
from drafthead.core.target.features import Features

# Positions that are not worth cutting off: to read them all costs as much as to read one.
FEW = 8


class LateCommits:
    """The commits that a drafter has not read yet, in order."""

    def __init__(self) -> None:
        self.parts: list[Committed] = []

    def add(self, committed: Committed) -> None:
        """Append one part."""
        self.parts.append(committed)

    def take(self) -> Committed | None:
        """All of them as one, None when there is none; they then count as read."""
        parts, self.parts = self.parts, []
        if len(parts) > 1:
            return joined(parts)
        if not parts or parts[0].tokens.shape[1] <= FEW:
            return parts[0] if parts else None
        return parts[0].cut()

    def join_rows(self, other: "LateCommits", order: Sequence[int]) -> None:
        """Raises ValueError while one of them has unread parts: these are of different lengths."""
        if self.parts or other.parts:
            raise ValueError("what was committed must be read before rows join")

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Keep the rows [R] only, in that order."""
        places = to_host(rows)
        # Other widths would be other graphs.
        self.parts = [replace(part.of_rows(places), width=part.width) for part in self.parts]


class LateReader(DraftSession):
    """A session that reads the prompt at once, and later commits when it is to propose."""

    row_state: ClassVar[tuple[str, ...]] = ("unread", "roots")

    def __init__(self, memory: FreshMemory) -> None:
        """`memory` is that of the session's caches."""
        self.memory = memory
        self.unread = LateCommits()
        self.roots: torch.Tensor | None = None  # [B] the last tokens that were read

    def commit(self, committed: Committed) -> None:
        """Collect what was committed; the prompt is read at once."""
        self.unread.add(committed)
        if self.roots is None:
            self.catch_up()

    def catch_up(self) -> None:
        """Read what is unread; `propose` calls this first, if it does not read the last part."""
        last = self.read_to_last_part()
        if last is not None:
            self.read(last)

    def read_to_last_part(self) -> Committed | None:
        """Read what is unread, but for the last part of it, which is returned if there is one."""
        committed = self.unread.take()
        if committed is None:
            return None
        *earlier, last = (part.sized(self.memory) for part in committed.chunks())
        for part in earlier:
            self.read(part)
        self.roots = committed.ends.roots
        return last

    @abstractmethod
    def read(self, committed: Committed) -> None:
        """Read what was committed since the last time, or the next part of it.

        Of all parts but the last, a row may have nothing: what is computed at its end is replaced.
        """

    def join_rows(self, other: Self, order: Sequence[int]) -> None:
        self.catch_up()
        other.catch_up()
        super().join_rows(other, order)

    def cut(self, length: int) -> None:
        self.catch_up()
        super().cut(length)
        self.roots = None


def joined(parts: list[Committed]) -> Committed:
    """The parts joined row by row: each row's positions of all parts, then padding.

    Parts ``a b`` and ``c .`` of lengths 2 and 1 make ``a b c .`` of length 3; ``a .`` and ``c d``
    of lengths 1 and 2 make ``a c d .``.
    """
    parts = [part.cut() for part in parts]
    steps = [torch.arange(p.tokens.shape[1], device=p.tokens.device) for p in parts]
    pairs = zip(parts, steps, strict=True)
    padding = torch.cat([step >= part.lengths[:, None] for part, step in pairs], dim=1)
    order = padding.int().argsort(dim=1, stable=True)  # [B, T] padding goes last
    rows = torch.arange(order.shape[0], device=order.device)[:, None]

    def in_order(tables: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tables, dim=1)[rows, order]

    tokens = in_order([part.tokens for part in parts])
    features = Features.joined([part.features for part in parts], in_order)
    lengths = torch.stack([part.lengths for part in parts]).sum(0)
    rows_of_parts = zip(*(part.new_tokens for part in parts), strict=True)
    new_tokens = [[token for new in row for token in new] for row in rows_of_parts]
    return Committed(tokens, features, lengths, host_tokens=new_tokens)
