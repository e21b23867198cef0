"""A cache for the keys and values of a draft transformer."""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn

from drafthead.heads.layers.decoder_layer import SelfAttention

# Columns by which a cache grows at least; it grows by half, so that long answers copy it few times.
BLOCK = 128
GROWTH = 1.5


class CacheColumns:
    """What one pass sees of a cache: where its keys and values go, and how far it looks.

    Made of tensors, so that a compiled pass can be given them.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],  # of each layer [B, Hkv, capacity, head_dim]
        values: Sequence[torch.Tensor],
        columns: torch.Tensor,  # [N] that the pass writes
        end: int,  # columns that it sees
    ):
        self.keys, self.values, self.columns, self.end = keys, values, columns, end

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values [B, Hkv, N, head_dim].

        Returns both for all S columns of the mask, [B, Hkv, S, head_dim].
        """
        stores = self.keys[layer], self.values[layer]
        for store, states in zip(stores, (keys, values), strict=True):
            store.index_copy_(2, self.columns, states)
        return stores[0][:, :, : self.end], stores[1][:, :, : self.end]


class DraftCache:
    """Keys and values of a draft transformer: what each row has committed, then what is pending.

    Column layout for rows that have committed 5, 3 and 4 positions (`#`), with two pending nodes
    (`t`) after them::

        # # # # # t t
        # # # . . t t
        # # # # . t t

    A pass over N nodes asks for its positions, its mask and its columns, writes the nodes into
    these columns of every layer and calls `stay`; more passes may follow. `commit` keeps the first
    pending nodes of each row, `discard` none.
    """

    def __init__(self, layers: Iterable[nn.Module]):
        """A cache for layers that have their attention under the name `self_attn`."""
        attentions = [cast(SelfAttention, layer.self_attn) for layer in layers]
        self.weights = [attention.k_proj.weight for attention in attentions]
        self.head_dims = [attention.head_dim for attention in attentions]
        # Of each layer [B, Hkv, capacity, head_dim]; there is nothing before the first pass.
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.lengths: torch.Tensor | None = None  # [B] committed positions
        self.longest = 0  # no row has committed more; known without asking the device
        self.pending = 0

    def positions(self, nodes: torch.Tensor) -> torch.Tensor:
        """Positions [B or 1, N] of new nodes [B, N] that follow each other."""
        steps = torch.arange(nodes.shape[1], device=nodes.device)[None]
        return steps if self.lengths is None else self.lengths[:, None] + steps

    def mask(self, visible: torch.Tensor) -> torch.Tensor:
        """The bool mask [B or 1, 1, N, S] of a pass over N new nodes.

        `visible` [B or 1, N, pending + N]: which pending and new nodes each new node sees;
        every node sees all that its row has committed.
        """
        if self.lengths is None:
            return visible[:, None]
        columns = torch.arange(self.longest, device=visible.device)
        committed = (columns < self.lengths[:, None])[:, None, None]  # [B, 1, 1, longest]
        batch, num_nodes = self.lengths.shape[0], visible.shape[1]
        return torch.cat(
            [
                committed.expand(batch, 1, num_nodes, -1),
                visible[:, None].expand(batch, 1, num_nodes, -1),
            ],
            dim=-1,
        )

    def columns(self, nodes: torch.Tensor) -> torch.Tensor:
        """The columns [N] for a pass over new nodes [B, N], after what is pending; makes room."""
        start = self.longest + self.pending
        end = start + nodes.shape[1]
        capacity = self.keys[0].shape[2] if self.keys else 0
        if capacity <= end:  # never full: compiled passes would take that for another layout
            capacity = -(-int(end * GROWTH) // BLOCK) * BLOCK
            self.keys, self.values = (
                self._enlarged(old, nodes.shape[0], capacity) for old in (self.keys, self.values)
            )
        return torch.arange(start, end, device=nodes.device)

    def _enlarged(self, old: list[torch.Tensor], rows: int, capacity: int) -> list[torch.Tensor]:
        """Tensors of each layer that begin with the old ones, if there are any."""
        stores = []
        for layer, (weight, size) in enumerate(zip(self.weights, self.head_dims, strict=True)):
            # Zeros: a masked column still takes part in sums, and 0 x NaN is NaN.
            store = weight.new_zeros(rows, weight.shape[0] // size, capacity, size)
            if old:
                store[:, :, : old[layer].shape[2]] = old[layer]
            stores.append(store)
        return stores

    def stay(self, num_nodes: int) -> None:
        """The nodes of the last pass stay pending."""
        self.pending += num_nodes

    def discard(self) -> None:
        """Forget all pending nodes."""
        self.pending = 0

    def commit(self, counts: torch.Tensor) -> None:
        """Keep the first `counts` [B] pending nodes of each row and forget the others.

        With 5 and 3 positions committed and nodes at columns 5 6, counts (1, 2) keep column 5 of
        the first row and move columns 5 6 of the second to 3 4: 6 and 5 are committed.
        """
        added, on_cpu = self.pending, counts.device.type == "cpu"
        self.pending = 0
        if self.lengths is None:  # all rows begin at the first column
            self.lengths = counts
        else:
            if counts.shape[0] > 1 or not on_cpu:
                self._move(self.lengths, added)
            self.lengths = self.lengths + counts
        self.longest += added
        self._measure()

    def _move(self, lengths: torch.Tensor, added: int) -> None:
        """Move the pending columns to the end of each row's `lengths` [B] committed ones."""
        rows = torch.arange(lengths.shape[0], device=lengths.device)[:, None]
        places = lengths[:, None] + torch.arange(added, device=lengths.device)
        for store in (*self.keys, *self.values):
            by_column = store.transpose(1, 2)  # [B, columns, Hkv, head_dim], a view
            moved = by_column[:, self.longest : self.longest + added].clone()
            by_column[rows, places] = moved

    def _measure(self) -> None:
        """Lower `longest` to what the longest row has committed.

        Reading that off a GPU is a synchronisation, so there it waits until the cache is full.
        """
        assert self.lengths is not None
        if self.lengths.device.type == "cpu" or self.longest + BLOCK > self.keys[0].shape[2]:
            self.longest = int(self.lengths.max())

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Go on with the rows [R] of the batch only, in that order."""
        self.keys = [store[rows] for store in self.keys]
        self.values = [store[rows] for store in self.values]
        if self.lengths is not None:
            self.lengths = self.lengths[rows]
            self._measure()
