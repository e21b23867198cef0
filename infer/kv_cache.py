"""A preallocated key-value cache that a token tree can be written behind and cut back from.

Column layout for three rows that have committed 5, 3 and 4 positions (`#`), with a tree of two
nodes (`t`) behind them; the columns in between are masked::

    # # # # # t t
    # # # . . t t
    # # # # . t t

All rows write the tree at the same columns, one slice a layer. Committing moves each row's
accepted nodes to the end of that row's own part, one gather for all layers.
"""

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

# Capacity grows by half and to whole blocks, so that long answers copy the cache a few times only.
BLOCK = 128
GROWTH = 1.5


class TreeCache(Cache):
    """Keys and values of all layers, in one tensor each for every layer shape.

    Use: a pass over the right-padded prompts, `commit_prompt`; then again and again
    a pass over nodes with the mask of `mask`, `commit`. Passes may follow each other without a
    commit; their nodes then stand behind each other until `commit` or `discard`.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.prompt_states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # One store per shape of layer: keys [G, B, H, S, Dk] and values [G, B, H, S, Dv].
        self.stores: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.place: dict[int, tuple[int, int]] = {}  # layer -> (store, index within the store)
        self.lengths: torch.Tensor | None = None  # [B] committed positions
        self.longest = 0  # max of lengths, known to the host
        self.pending = 0  # nodes written behind the committed positions

    # ---- what transformers' models call -------------------------------------------------------

    def update(
        self,
        key_states: torch.Tensor,  # [B, H, T, Dk]
        value_states: torch.Tensor,  # [B, H, T, Dv]
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write T new positions of a layer; returns the used columns [B, H, S, D] of both."""
        if not self.stores:
            self.prompt_states[layer_idx] = (key_states, value_states)
            return key_states, value_states
        store, index = self.place[layer_idx]
        keys, values = (tensor[index] for tensor in self.stores[store])
        start = self.longest + self.pending
        end = start + key_states.shape[-2]
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use."""
        return self.longest + self.pending

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that a pass over `query_length` nodes sees, and where they start."""
        return self.longest + self.pending + query_length, 0

    # ---- prompt -------------------------------------------------------------------------------

    def commit_prompt(self, lengths: torch.Tensor, longest: int, room: int) -> None:
        """Take over the prompt pass: lengths [B], `longest` their maximum.

        `room` is the number of columns to allocate beside the prompt.
        """
        self.lengths, self.longest = lengths, longest
        capacity = self._rounded(longest + room)
        groups: dict[tuple[torch.Size, torch.Size], list[int]] = {}
        for layer, (keys, values) in sorted(self.prompt_states.items()):
            groups.setdefault((keys.shape, values.shape), []).append(layer)
        for store, layers in enumerate(groups.values()):
            self.place.update({layer: (store, index) for index, layer in enumerate(layers)})
            both = zip(*(self.prompt_states[layer] for layer in layers), strict=True)
            keys, values = (self._allocate(states, capacity) for states in both)
            self.stores.append((keys, values))
        self.prompt_states.clear()

    @staticmethod
    def _rounded(columns: int) -> int:
        return -(-columns // BLOCK) * BLOCK

    @staticmethod
    def _allocate(states: Sequence[torch.Tensor], capacity: int) -> torch.Tensor:
        """[G, B, H, capacity, D] that starts with the states [B, H, T, D] of G layers.

        Zeros, not uninitialised memory: a masked column still takes part in sums, and 0 x NaN is
        NaN.
        """
        batch, heads, used, size = states[0].shape
        store = states[0].new_zeros(len(states), batch, heads, capacity, size)
        store[:, :, :, :used] = torch.stack(tuple(states))
        return store

    # ---- steps --------------------------------------------------------------------------------

    def mask(self, visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The additive attention mask [B, 1, N, S] of a pass over N new nodes.

        `visible` [B or 1, N, pending + N] says which pending and new nodes each new node sees;
        every node sees all that its row has committed. Makes room for the nodes.
        """
        assert self.lengths is not None
        batch, num_nodes = self.lengths.shape[0], visible.shape[1]
        self._ensure(self.longest + self.pending + num_nodes)
        mask = torch.zeros(
            batch, 1, num_nodes, self.longest + visible.shape[2], dtype=dtype, device=visible.device
        )
        blocked = torch.finfo(dtype).min
        if batch > 1:  # a single row has no gap between its positions and its nodes
            columns = torch.arange(self.longest, device=visible.device)
            gap = columns >= self.lengths[:, None]
            mask[..., : self.longest].masked_fill_(gap[:, None, None], blocked)
        mask[..., self.longest :].masked_fill_(~visible[:, None], blocked)
        return mask

    def _ensure(self, columns: int) -> None:
        capacity = self.stores[0][0].shape[3]
        if columns <= capacity:
            return
        larger = self._rounded(max(columns, int(capacity * GROWTH)))
        self.stores = [
            (self._allocate(keys.unbind(), larger), self._allocate(values.unbind(), larger))
            for keys, values in self.stores
        ]

    def keep_pending(self, num_nodes: int) -> None:
        """The nodes of the last pass stay, so that another pass can follow behind them."""
        self.pending += num_nodes

    def discard(self) -> None:
        """Forget all pending nodes."""
        self.pending = 0

    def commit(
        self,
        path: torch.Tensor,  # [B, P] nodes to keep, in order; anything behind a row's length
        lengths: torch.Tensor,  # [B] how many of them
        longest: int,  # the new maximum of committed positions
        in_place: bool = False,  # a single row whose kept nodes are 0, 1, 2, ...
    ) -> None:
        """Keep the nodes on the accepted path and forget the others.

        With 4 positions committed, nodes at columns 4 5 6 7 and path (0, 2), columns 4 and 6 move
        to 4 and 5, and 6 positions are committed.
        """
        assert self.lengths is not None
        if not in_place:
            self._move(path)
        self.lengths = self.lengths + lengths
        self.longest = longest
        self.pending = 0

    def _move(self, path: torch.Tensor) -> None:
        """Copy the nodes [B, P] of each row behind its committed positions."""
        assert self.lengths is not None
        batch, count = path.shape
        if batch == 1:  # one row's destination is a slice, which copies faster than an index
            columns = self.longest + path[0]
            for store in self.stores:
                for tensor in store:
                    kept = tensor.index_select(3, columns)
                    tensor[:, :, :, self.longest : self.longest + count] = kept
            return
        source = self.longest + path
        destination = self.lengths[:, None] + torch.arange(count, device=path.device)
        rows = torch.arange(batch, device=path.device)[:, None]
        for store in self.stores:
            for tensor in store:
                by_column = tensor.permute(1, 3, 0, 2, 4)  # [B, S, G, H, D], a view
                by_column[rows, destination] = by_column[rows, source]

    def keep_rows(self, rows: torch.Tensor, longest: int) -> None:
        """Go on with the rows [R] of the batch only; `longest` is the maximum of their lengths."""
        assert self.lengths is not None
        self.stores = [
            (keys.index_select(1, rows), values.index_select(1, rows))
            for keys, values in self.stores
        ]
        self.lengths = self.lengths[rows]
        self.longest = longest
