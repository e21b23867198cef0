"""The cache of a draft transformer."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from drafthead.heads.cache import BLOCK, ColumnCache
from drafthead.heads.layers.decoder_layer import SelfAttention


class DraftCache(ColumnCache):
    """A cache whose rows keep the first of their pending nodes.

    How many they keep is known to the device alone: reading it off a GPU would be a
    synchronisation, so there `longest` is an upper bound until the cache is nearly full.
    """

    def __init__(self, layers: Iterable[nn.Module], rows: int):
        """An empty cache for layers that have their attention under the name `self_attn`."""
        super().__init__()
        for layer in layers:
            attention = cast(SelfAttention, layer.self_attn)
            weight, size = attention.k_proj.weight, attention.head_dim
            for stores in (self.keys, self.values):
                stores.append(weight.new_zeros(rows, weight.shape[0] // size, 0, size))
        self.lengths = torch.zeros(rows, dtype=torch.long, device=self.keys[0].device)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been committed."""
        return self.longest == 0

    @property
    def no_gaps(self) -> bool:
        """As for any cache, where `longest` is exact."""
        return super().no_gaps and (self.is_empty or self.keys[0].device.type == "cpu")

    def commit_first(self, counts: torch.Tensor) -> None:
        """Keep the first `counts` [B] pending nodes of each row and forget the others.

        With 5 and 3 positions committed and nodes at columns 5 6, counts (1, 2) keep column 5 of
        the first row and move columns 5 6 of the second to 3 4: 6 and 5 are committed.
        """
        assert self.lengths is not None
        nodes = torch.arange(self.pending, device=counts.device)
        path = None if self.no_gaps else nodes.expand(len(counts), -1)
        lengths = self.lengths + counts
        self.commit(path, lengths, self._longest(lengths, self.longest + self.pending))

    def keep_rows(self, rows: torch.Tensor, longest: int | None = None) -> None:
        """Continue with the rows [R] of the batch only, in that order."""
        assert self.lengths is not None
        super().keep_rows(rows, longest or self._longest(self.lengths[rows], self.longest))

    def _longest(self, lengths: torch.Tensor, most: int) -> int:
        """The largest of the lengths [B], or a bound of it."""
        is_free = lengths.device.type == "cpu"
        return int(lengths.max()) if is_free or most + BLOCK > self.keys[0].shape[2] else most
