"""A preallocated key-value cache that a token tree can be written behind and cut back from.

Column layout for three rows that have committed 5, 3 and 4 positions (`#`), with a tree of two
nodes (`t`) behind them; the columns in between are masked::

    # # # # # t t
    # # # . . t t
    # # # # . t t

All rows write the tree at the same columns, one slice a layer. Committing moves each row's
accepted nodes to the end of that row's own part. Each layer has memory of its own: a compiled pass
can then write into it in place.
"""

from collections.abc import Callable, Sequence

import torch
from transformers.cache_utils import Cache

from drafthead.heads.layers.columns import move_columns

# Capacity grows by half and to whole blocks, so that long answers copy the cache a few times only.
BLOCK = 128
GROWTH = 1.5

Layers = list[torch.Tensor]  # of each layer [B, H, capacity, D]
# Copies columns of every layer: (keys, values, source [B, P], destination [B, P]).
Mover = Callable[[Layers, Layers, torch.Tensor, torch.Tensor], None]


class StepCache(Cache):
    """What one pass sees of a cache: where its keys and values go, and how far it looks."""

    def __init__(
        self,
        keys: Sequence[torch.Tensor],  # of each layer [B, H, capacity, D]
        values: Sequence[torch.Tensor],
        columns: torch.Tensor,  # [T] that the pass writes
        end: int,  # columns that it attends to
    ):
        super().__init__(layers=[])
        self.keys, self.values, self.columns, self.end = keys, values, columns, end

    def update(
        self,
        key_states: torch.Tensor,  # [B, H, T, Dk]
        value_states: torch.Tensor,  # [B, H, T, Dv]
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write T new positions of a layer; returns the columns [B, H, S, D] in use of both."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.index_copy_(2, self.columns, key_states)
        values.index_copy_(2, self.columns, value_states)
        return keys[:, :, : self.end], values[:, :, : self.end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use, the new ones not among them."""
        return self.end - self.columns.shape[0]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that a pass sees, and where they start."""
        return self.end, 0


class TreeCache(Cache):
    """Keys and values of all layers.

    Use: a pass over the right-padded prompts, `commit_prompt`; then again and again
    a pass over nodes with the mask of `mask`, `commit`. Passes may follow each other without a
    commit; their nodes then stand behind each other until `commit` or `discard`.
    """

    def __init__(self, bucket: int = 1, move: Mover | None = None) -> None:
        """Masks are as wide as a multiple of `bucket` columns; `move` copies columns."""
        super().__init__(layers=[])
        self.bucket, self.move = bucket, move or move_columns
        self.prompt_states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.keys: Layers = []
        self.values: Layers = []
        self.lengths: torch.Tensor | None = None  # [B] committed positions
        self.longest = 0  # max of lengths, known to the host
        self.pending = 0  # nodes written behind the committed positions
        self.numbers = torch.arange(0)  # of the columns

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
        if not self.keys:
            self.prompt_states[layer_idx] = (key_states, value_states)
            return key_states, value_states
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        start = self.longest + self.pending
        end = start + key_states.shape[-2]
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        seen = rounded(end, self.bucket)
        return keys[:, :, :seen], values[:, :, :seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use."""
        return self.longest + self.pending

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that a pass over `query_length` nodes sees, and where they start."""
        return rounded(self.longest + self.pending + query_length, self.bucket), 0

    # ---- prompt -------------------------------------------------------------------------------

    def commit_prompt(self, lengths: torch.Tensor, longest: int, room: int) -> None:
        """Take over the prompt pass: lengths [B], `longest` their maximum.

        `room` is the number of columns to allocate beside the prompt.
        """
        self.lengths, self.longest = lengths, longest
        capacity = rounded(longest + room + 1, max(BLOCK, self.bucket))
        for layer in range(len(self.prompt_states)):
            keys, values = self.prompt_states.pop(layer)
            self.keys.append(enlarged(keys, capacity))
            self.values.append(enlarged(values, capacity))

    # ---- steps --------------------------------------------------------------------------------

    def mask(self, visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The additive attention mask [B, 1, N, S] of a pass over N new nodes.

        `visible` [B or 1, N, pending + N] says which pending and new nodes each new node sees;
        every node sees all that its row has committed. Makes room for the nodes.
        """
        assert self.lengths is not None
        batch, num_nodes = self.lengths.shape[0], visible.shape[1]
        end = self.longest + visible.shape[2]
        width = rounded(end, self.bucket)
        self._ensure(width)
        mask = torch.zeros(batch, 1, num_nodes, width, dtype=dtype, device=visible.device)
        blocked = torch.finfo(dtype).min
        if batch > 1:  # a single row has no gap between its positions and its nodes
            columns = torch.arange(self.longest, device=visible.device)
            gap = columns >= self.lengths[:, None]
            mask[..., : self.longest].masked_fill_(gap[:, None, None], blocked)
        mask[..., self.longest : end].masked_fill_(~visible[:, None], blocked)
        mask[..., end:] = blocked
        return mask

    def make_room(self, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns [S] that a pass over N new nodes sees, and those [N] that it writes."""
        assert self.lengths is not None
        start = self.longest + self.pending
        width = rounded(start + num_nodes, self.bucket)
        self._ensure(width)
        if self.numbers.shape[0] < width:
            self.numbers = torch.arange(self.keys[0].shape[2], device=self.lengths.device)
        return self.numbers[:width], self.numbers[start : start + num_nodes]

    def _ensure(self, columns: int) -> None:
        """Make room for `columns` and one more: a full cache is laid out in memory as no part of
        it is, and would need compiled passes of its own.
        """
        capacity = self.keys[0].shape[2]
        if columns < capacity:
            return
        larger = rounded(max(columns + 1, int(capacity * GROWTH)), max(BLOCK, self.bucket))
        self.keys = [enlarged(keys, larger) for keys in self.keys]
        self.values = [enlarged(values, larger) for values in self.values]

    def keep_pending(self, num_nodes: int) -> None:
        """The nodes of the last pass stay, so that another pass can follow behind them."""
        self.pending += num_nodes

    def discard(self) -> None:
        """Forget all pending nodes."""
        self.pending = 0

    def commit(
        self,
        path: torch.Tensor | None,  # [B, P] nodes to keep, in order; anything behind a row's length
        lengths: torch.Tensor,  # [B] of the rows from now on
        longest: int,  # their maximum
    ) -> None:
        """Keep the nodes on the accepted path and forget the others.

        With 4 positions committed, nodes at columns 4 5 6 7, path (0, 2) and length 6, columns 4
        and 6 move to 4 and 5. Without a path the nodes to keep already stand where they belong.
        """
        assert self.lengths is not None
        if path is not None:
            steps = torch.arange(path.shape[1], device=path.device)
            self.move(self.keys, self.values, self.longest + path, self.lengths[:, None] + steps)
        self.lengths, self.longest, self.pending = lengths, longest, 0

    def keep_rows(self, rows: torch.Tensor, longest: int) -> None:
        """Go on with the rows [R] of the batch only; `longest` is the maximum of their lengths."""
        assert self.lengths is not None
        self.keys = [keys.index_select(0, rows) for keys in self.keys]
        self.values = [values.index_select(0, rows) for values in self.values]
        self.lengths = self.lengths[rows]
        self.longest = longest


def rounded(columns: int, block: int) -> int:
    """The next multiple of `block`."""
    return -(-columns // block) * block


def enlarged(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """[B, H, capacity, D] that starts with the states [B, H, T, D].

    Zeros, not uninitialised memory: a masked column still takes part in sums, and 0 x NaN is NaN.
    """
    batch, heads, used, size = states.shape
    store = states.new_zeros(batch, heads, capacity, size)
    store[:, :, :used] = states
    return store
