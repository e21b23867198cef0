"""What a target has committed and a drafter has not read yet.

A step without a proposal should cost what plain decoding costs, so drafters put reading off until
they are to propose; what has come together by then is read in one pass.
"""

from abc import abstractmethod

import torch

from drafthead.heads.drafting.drafter import Committed, DraftSession
from drafthead.heads.target.features import Features


class Unread:
    """Commits in the order in which they came."""

    def __init__(self) -> None:
        self.parts: list[Committed] = []

    def add(self, committed: Committed) -> None:
        """Put one more behind the others."""
        self.parts.append(committed)

    def take(self) -> Committed | None:
        """All of them as one, None when there is nothing; they then count as read."""
        parts, self.parts = self.parts, []
        if len(parts) > 1:
            return joined(parts)
        return parts[0].cut() if parts else None

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop what other rows have committed."""
        self.parts = [
            Committed(
                part.tokens[rows],
                part.features.map(lambda table: table[rows]),
                part.lengths[rows],
                part.width,
            )
            for part in self.parts
        ]


class LateReader(DraftSession):
    """A session that reads the prompt at once, and what follows when it is to propose."""

    def __init__(self) -> None:
        self.unread = Unread()
        self.roots: torch.Tensor | None = None  # [B] the last tokens that were read

    def commit(self, committed: Committed) -> None:
        """Keep it to be read."""
        self.unread.add(committed)
        if self.roots is None:
            self.catch_up()

    def catch_up(self) -> None:
        """Read what is unread; to be called before anything is proposed."""
        committed = self.unread.take()
        if committed is not None:
            self.read(committed)
            self.roots = committed.ends.roots

    @abstractmethod
    def read(self, committed: Committed) -> None:
        """Take in what was committed since the last time."""

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop the state of all other rows."""
        assert self.roots is not None
        self.roots = self.roots[rows]
        self.unread.keep_rows(rows)


def joined(parts: list[Committed]) -> Committed:
    """Each row's positions of all parts, one behind the other, and padding behind them.

    Parts ``a b`` and ``c .`` of lengths 2 and 1 make ``a b c .`` of length 3; ``a .`` and ``c d``
    of lengths 1 and 2 make ``a c d .``.
    """
    parts = [part.cut() for part in parts]
    steps = [torch.arange(p.tokens.shape[1], device=p.tokens.device) for p in parts]
    both = zip(parts, steps, strict=True)
    padding = torch.cat([step >= part.lengths[:, None] for part, step in both], dim=1)
    order = padding.int().argsort(dim=1, stable=True)  # [B, T] what is no padding goes first
    rows = torch.arange(order.shape[0], device=order.device)[:, None]

    def in_order(tables: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tables, dim=1)[rows, order]

    tokens = in_order([part.tokens for part in parts])
    taps = zip(*(part.features.taps for part in parts), strict=True)
    last = [part.features.last for part in parts if part.features.last is not None]
    features = Features(in_order(last) if last else None, tuple(in_order([*tap]) for tap in taps))
    lengths = torch.stack([part.lengths for part in parts]).sum(0)
    return Committed(tokens, features, lengths)
