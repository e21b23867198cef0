"""The column cache as transformers' models see it."""

import copy
from collections.abc import Sequence
from typing import cast

import torch
from transformers.cache_utils import Cache

from drafthead.core.kv_cache.column_cache import (
    FRESH,
    CacheColumns,
    CacheView,
    ColumnCache,
    FreshMemory,
    Mover,
    additive,
    move_columns,
)

INDEXED = 100_000  # added to a layer's number: the keys of its indexer, which are columns as well
# Of some layers keys and values [B, H, capacity, D], and columns [T].
Places = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]


class StepCache(CacheColumns, Cache):
    """`CacheColumns` for a model of transformers."""

    pending: int | None = None  # of a cache for the tree kernel: nodes that the new ones follow

    def __init__(
        self,
        keys: Sequence[torch.Tensor],  # of each layer [B, H, capacity, D]
        values: Sequence[torch.Tensor],  # as keys
        columns: torch.Tensor,  # [N] that the pass writes
        end: int,  # columns that it sees
        numbers: Sequence[int] | None = None,
    ):
        """`numbers` are those of the layers that the keys and values belong to; 0, 1, ... without
        them.
        """
        CacheColumns.__init__(self, keys, values, columns, end)
        Cache.__init__(self, layers=[])
        self.places = {number: place for place, number in enumerate(numbers or range(len(keys)))}

    @classmethod
    def of(cls, view: CacheView, numbers: Sequence[int] | None = None) -> "StepCache":
        """The cache of a view, or what a kernel takes in its place."""
        room = view.room
        if room.kernels is not None:
            return cast(StepCache, view.opened())
        return cls(view.keys, view.values, room.columns, len(room.seen), numbers)

    def update(
        self,
        key_states: torch.Tensor,  # [B, H, T, Dk]
        value_states: torch.Tensor,  # [B, H, T, Dv]
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write T new positions of a layer; returns the columns [B, H, S, D] in use of both."""
        return self.append(self.places[layer_idx], key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use, the new ones not among them."""
        return self.end - self.columns.shape[0]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that a pass sees, and where they start."""
        return self.end, 0


class TreeCache(ColumnCache, Cache):
    """Keys and values of a target: a pass over the prompts, `commit_prompt`, then trees."""

    def __init__(self, memory: FreshMemory = FRESH, move: Mover = move_columns) -> None:
        ColumnCache.__init__(self, memory, move)
        Cache.__init__(self, layers=[])
        self.prompt_states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.numbers_of: dict[int, int] = {}  # which of `keys` belongs to a layer

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
        number = self.numbers_of[layer_idx]
        keys, values = self.keys[number], self.values[number]
        start = self.longest + self.pending
        end = start + key_states.shape[-2]
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        seen = self.memory.seen(end)
        return keys[:, :, :seen], values[:, :, :seen]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write T new keys [B, T, D] of a layer's indexer; returns the used columns [B, S, D]."""
        keys = indexer_key_states[:, None]
        return self.update(keys, keys[..., :0], INDEXED + layer_idx)[0][:, 0]

    def places(self, layers: Sequence[int], tokens: int) -> Places:
        """The keys and values of layers, and the columns that so many new ones go to."""
        layers = [self.numbers_of[layer] for layer in layers]
        start = self.longest + self.pending
        columns = self._numbers()[start : start + tokens]
        return [self.keys[n] for n in layers], [self.values[n] for n in layers], columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use."""
        return self.longest + self.pending

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that a pass over `query_length` nodes sees, and where they start."""
        if not self.keys:
            return query_length, 0  # `update` returns the states as they come
        return self.memory.seen(self.longest + self.pending + query_length), 0

    def commit_prompt(self, lengths: torch.Tensor, longest: int, room: int) -> None:
        """Take over the prompt pass: lengths [B], `longest` their maximum.

        `room` is the number of columns to allocate beside the prompt.
        """
        self.lengths, self.longest = lengths, longest
        self.numbers_of = {layer: n for n, layer in enumerate(sorted(self.prompt_states))}
        layers = [self.prompt_states.pop(layer) for layer in self.numbers_of]
        self.keys, self.values = ([pair[part] for pair in layers] for part in (0, 1))
        del layers  # so that each layer's states are free again when they have been copied
        self._enlarge(self._capacity(longest + room + 1, len(self.keys[0])))

    def part(self, rows: Sequence[int]) -> "TreeCache":
        """A cache of its own with copies of rows of this one, which has no pending nodes.

        Where nothing was committed it is empty.
        """
        if self.lengths is None:
            return type(self)(self.memory, self.move)
        part = copy.copy(self)
        part.keep_rows(torch.tensor(rows, device=self.lengths.device))
        return part

    def collect(
        self, parts: Sequence[ColumnCache], places: Sequence[Sequence[int]], room: int
    ) -> None:
        self.numbers_of = next(part.numbers_of for part in parts if isinstance(part, TreeCache))
        super().collect(parts, places, room)

    def additive_mask(self, visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`mask` [B, 1, N, S] of visible [B or 1, N, pending + N], added to attention scores."""
        assert self.lengths is not None
        return additive(self.mask(visible), dtype).expand(len(self.lengths), -1, -1, -1)

    def later_mask(self, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`additive_mask` of a pass over a prompt's positions `places` [T] after what is here."""
        return self.additive_mask((places[:, None] >= places)[None], dtype)
