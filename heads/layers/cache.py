"""The cache of a draft transformer."""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn

from drafthead.core.drafting.drafter import Committed, LateTokens
from drafthead.core.host import to_host
from drafthead.core.kv_cache.column_cache import (
    FRESH,
    CacheView,
    ColumnCache,
    FreshMemory,
    Room,
    TreeKernels,
)
from drafthead.heads.layers.decoder_layer import SelfAttention


class DraftCache(ColumnCache):
    """A cache whose rows keep the first of their pending nodes."""

    def __init__(self, layers: Iterable[nn.Module], rows: int, memory: FreshMemory = FRESH):
        """An empty cache for layers that know their `cache_sizes`, or whose `self_attn` does.

        `memory` as for `ColumnCache`.
        """
        super().__init__(memory)
        for layer in layers:
            heads, *widths = cast(SelfAttention, getattr(layer, "self_attn", layer)).cache_sizes
            weight = next(layer.parameters())
            for stores, width in zip((self.keys, self.values), widths, strict=True):
                stores.append(weight.new_zeros(rows, heads, 0, width))
        self.lengths = torch.zeros(rows, dtype=torch.long, device=self.keys[0].device)
        self.host_lengths = [0] * rows
        # Where these are bounds as yet: the lengths before, and the tokens that are added.
        self.open: tuple[list[int], LateTokens] | None = None

    def settle(self) -> None:
        """Replace the bounds of the last commit by the lengths, once its tokens were read."""
        if self.open is None:
            return
        before, late = self.open
        if late.known is not None:
            self.host_lengths = [n + len(new) for n, new in zip(before, late.known, strict=True)]
            self.longest, self.open = max(self.host_lengths), None

    def commit_first(self, counts: torch.Tensor, host_counts: Sequence[int]) -> None:
        """Keep the first `counts` [B] pending nodes of each row and forget the others.

        `host_counts` are the same numbers: reading them off a GPU would make the host wait.

        With 5 and 3 positions committed and nodes at columns 5 6, counts (1, 2) keep column 5 of
        the first row and move columns 5 6 of the second to 3 4: 6 and 5 are committed.
        """
        assert self.lengths is not None
        path = None
        if not self.no_gaps:
            path = torch.arange(self.pending, device=counts.device).expand(len(counts), -1)
        self.advance(self.lengths + counts, host_counts, path)

    def view_and_room(
        self, committed: Committed, drafted: int, kernels: TreeKernels | None = None
    ) -> tuple[CacheView, Room]:
        """The view of a pass that commits T positions, and room for N tokens that it drafts after.

        Each row keeps the first of the positions, and the tokens may overwrite what no row keeps.
        With 5 committed, bounds (2, 1), 4 positions and 3 drafted tokens, columns 5 to 8 are
        written first, then 7 to 9, which see 0 to 9.
        """
        count = committed.tokens.shape[1]
        self._ensure(self.memory.seen(self.longest + count + drafted))
        kept = max(map(sum, zip(self.host_lengths, committed.bounds, strict=True)))
        room = self.room(drafted, kernels, skipped=kept - self.longest)
        return self.view(count, kernels), room

    def advance(
        self,
        lengths: torch.Tensor,
        host_counts: Sequence[int],
        path: torch.Tensor | None = None,
        late: LateTokens | None = None,
    ) -> None:
        """Take over what a pass has committed, with the new lengths [B]; `path` as for `commit`.

        With `late` tokens `host_counts` are bounds until these were read, see `settle`.
        """
        if late is not None and late.known is None:
            self.open = self.host_lengths, late
        pairs = zip(self.host_lengths, host_counts, strict=True)
        self.host_lengths = [length + count for length, count in pairs]
        self.commit(path, lengths, max(self.host_lengths))

    def keep_rows(self, rows: torch.Tensor, longest: int | None = None) -> None:
        """Keep the rows [R] only, in that order."""
        self.settle()
        self.host_lengths = [self.host_lengths[row] for row in to_host(rows)]
        super().keep_rows(rows, longest or max(self.host_lengths))

    def join_rows(
        self, other: ColumnCache, order: Sequence[int], longest: int | None = None
    ) -> None:
        self.settle()
        both = self.host_lengths + cast(DraftCache, other).host_lengths
        self.host_lengths = [both[row] for row in order]
        super().join_rows(other, order, longest or max(self.host_lengths))

    def cut(self, length: int) -> None:
        self.settle()
        super().cut(length)
        self.host_lengths = [min(count, length) for count in self.host_lengths]
