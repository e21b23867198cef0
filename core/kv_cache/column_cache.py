"""A preallocated cache of keys and values, for targets and drafts alike.

Column layout for three rows that have committed 5, 3 and 4 positions (`#`), with two pending nodes
(`t`) after them; the columns in between are masked::

    # # # # # t t
    # # # . . t t
    # # # # . t t

All rows write their nodes at the same columns, one slice a layer. Committing moves each row's
accepted nodes to the end of that row's own part. Each layer has memory of its own, so that a
recorded pass can write into it in place; there that memory and all sizes come from few, see
`CacheMemory`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import pad

Shape = tuple[int, ...]
# Capacity comes in whole blocks, and grows by half: long answers copy the cache a few times only.
BLOCK = 128
GROWTH = 1.5
# Positions of each row that one pass over a prompt reads. What a pass computes on its way, and its
# mask, grow with them; more would hardly be quicker.
READ_CHUNK = 1024

Layers = list[torch.Tensor]  # of each layer [B, H, capacity, D]
# Copies columns of every layer: (keys, values, source [B, P], destination [B, P]).
Mover = Callable[[Layers, Layers, torch.Tensor, torch.Tensor], None]


class FreshStores:
    """Zeroed memory for one tensor of each shape, made when it is asked for."""

    def __init__(self, shapes: Sequence[Shape], like: torch.Tensor):
        """Of the number type of `like` [...], on its device."""
        self.shapes, self.dtype, self.device = shapes, like.dtype, like.device

    def __getitem__(self, place: int) -> torch.Tensor:
        """A tensor of the shape at a place; another one each time."""
        return torch.zeros(self.shapes[place], dtype=self.dtype, device=self.device)


class FreshMemory:
    """Memory that is made when it is asked for, and any number of columns, positions and rows."""

    is_recorded = False  # whether passes are recorded: they want few sizes, each at one address
    most_in_use = 0  # bytes, where these are counted

    def size(self, count: int) -> int:
        """Of how many positions, nodes or rows a pass is made for as many as are wanted."""
        return count

    def seen(self, end: int) -> int:
        """Columns that a pass sees whose nodes end there."""
        return end

    def capacity(self, columns: int, column: int) -> int:
        """Columns, of so many bytes, to allocate where some are wanted."""
        return rounded(columns, BLOCK)

    def take(self, shapes: Sequence[Shape], like: torch.Tensor) -> FreshStores:
        """Zeroed tensors of these shapes, of the number type of `like` [...] and on its device."""
        return FreshStores(shapes, like)


FRESH = FreshMemory()


def move_columns(
    keys: Sequence[torch.Tensor],  # of each layer [B, H, capacity, D]
    values: Sequence[torch.Tensor],  # as keys
    source: torch.Tensor,  # [B, P]
    destination: torch.Tensor,  # [B, P]
) -> None:
    """Copy each row's columns `source` to `destination`, in every layer.

    Source 4 6 and destination 4 5 turn columns ``. . . . a b c`` into ``. . . . a c c``.
    """
    rows = torch.arange(source.shape[0], device=source.device)[:, None]
    for layer in (*keys, *values):
        # Indexing on the right copies first, so sources and destinations may overlap.
        layer[rows, :, destination] = layer[rows, :, source]


class GrowingKeys(NamedTuple):
    """The keys or the values of a layer: those of the cache, and those that a pass adds.

    What an attention kernel is given that writes the new ones into the cache itself.
    """

    cache: torch.Tensor  # [B, G, C, D]
    new: torch.Tensor  # [B, G, N, D]
    pending: int  # nodes in the cache, which the new ones follow

    def to(self, device: torch.device) -> "GrowingKeys":
        """These columns on a device, for models whose layers share keys and may be on several."""
        return GrowingKeys(self.cache.to(device), self.new.to(device), self.pending)


class CacheColumns:
    """A cache as one pass sees it: the place of its keys and values, and how far it looks.

    Made of tensors, so that a recorded pass can be given them.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],  # of each layer [B, H, capacity, D]
        values: Sequence[torch.Tensor],
        columns: torch.Tensor,  # [N] that the pass writes
        end: int,  # columns that it sees
    ):
        self.keys, self.values, self.columns, self.end = keys, values, columns, end

    def of_layer(self, layer: int) -> "LayerColumns":
        """The write of keys and values by a layer's attention."""
        return LayerColumns(self, layer)

    def append(
        self,
        layer: int,
        keys: torch.Tensor,  # [B, H, N, D]
        values: torch.Tensor,  # [B, H, N, D]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values; returns all S columns of both, [B, H, S, D]."""
        stores = self.keys[layer], self.values[layer]
        for store, states in zip(stores, (keys, values), strict=True):
            # In place: memory is taken once, and a recorded pass knows its address.
            store.index_copy_(2, self.columns, states)
        # Views: attention reads the columns where they lie.
        return stores[0][:, :, : self.end], stores[1][:, :, : self.end]


class LayerColumns:
    """The columns of one layer, called with its new keys and values: see `CacheColumns.append`."""

    def __init__(self, cached: CacheColumns, layer: int):
        self.cached, self.layer = cached, layer

    def __call__(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [B, H, N, D]; returns all S columns of both."""
        return self.cached.append(self.layer, keys, values)


class TreeKernels(Protocol):
    """Attention over trees, and the moves after a verdict, where recorded passes have kernels."""

    most_nodes: int  # of a tree that they take

    def masks(
        self,
        visible: torch.Tensor,  # [B or 1, N, M] bool: which of M nodes each of N nodes sees
        lengths: torch.Tensor,  # [B] committed positions
        start: torch.Tensor,  # [] column of the first of the M nodes
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """The mask for the model, see `LayerMasks`."""
        ...

    def sight(
        self, visible: torch.Tensor, lengths: torch.Tensor, start: torch.Tensor
    ) -> torch.Tensor:
        """`masks` of layers without windows, int64 [B, 1, 3, N]: those of draft heads."""
        ...

    def cache(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], pending: int = 0
    ) -> CacheColumns:
        """The cache of keys and values [B, H, capacity, D] of each layer, after pending nodes."""
        ...

    def commit(
        self,
        states: Sequence[torch.Tensor],  # keys and values of all layers, [B, H, capacity, D]
        path: torch.Tensor,  # [B, P] accepted nodes in order
        accepted: torch.Tensor,  # [B] their number
        lengths: torch.Tensor,  # [B] positions committed before
        start: torch.Tensor,  # [] column of the tree's first node
    ) -> None:
        """Move the accepted nodes next to what their rows have committed."""
        ...


class Room(NamedTuple):
    """The columns of a pass's new nodes, and how far it looks."""

    seen: torch.Tensor  # [S] the numbers of the columns in use; none where a kernel attends
    columns: torch.Tensor  # [N] that the pass writes
    pending: int = 0  # nodes before them in the cache, of which only kernels ask
    kernels: TreeKernels | None = None  # that attend, where there are some for so many nodes

    def part(self, first: int, count: int) -> "Room":
        """The room of a pass over `count` of these nodes, which follow `first` others."""
        pending = self.pending if self.kernels is None else self.pending + first
        return self._replace(columns=self.columns[first : first + count], pending=pending)


class CacheView(NamedTuple):
    """A cache as a pass is given it, which appends nodes and sees them by a mask."""

    keys: Sequence[torch.Tensor]  # of each layer [B, H, capacity, D]
    values: Sequence[torch.Tensor]  # as keys
    lengths: torch.Tensor  # [B] committed positions
    room: Room

    def mask(
        self, visible: torch.Tensor, made: Callable[..., torch.Tensor] | None = None
    ) -> torch.Tensor:
        """The bool mask [B, 1, N, S], or what the kernel takes in its place.

        `visible` [B or 1, N, pending + N] is which pending and new nodes each new node sees. `made`
        may take the place of `visible_columns`.
        """
        room, (nodes, count) = self.room, visible.shape[1:]
        if room.kernels is not None:
            return room.kernels.sight(visible, self.lengths, room.columns[0] - (count - nodes))
        return (made or visible_columns)(visible, self.lengths, room.seen, room.columns)

    def opened(self) -> CacheColumns:
        """The cache to append to, of a pass with such a mask."""
        room = self.room
        if room.kernels is not None:
            return room.kernels.cache(self.keys, self.values, room.pending)
        return CacheColumns(self.keys, self.values, room.columns, len(room.seen))


class ColumnCache:
    """Keys and values of all layers: what each row has committed, then what is pending.

    A pass over N nodes asks for a `view`, which lets the cache grow where it must, and writes the
    nodes there. Then `commit` keeps a path of them, or
    `keep_pending` keeps all until a later `commit` or `discard`.
    """

    def __init__(self, memory: FreshMemory = FRESH, move: Mover = move_columns):
        """`move` copies columns; `memory` is where they lie, and knows which sizes passes want."""
        self.memory, self.move = memory, move
        self.stores: FreshStores | None = None  # what `keys` and `values` are made of
        self.keys: Layers = []
        self.values: Layers = []
        self.lengths: torch.Tensor | None = None  # [B] committed positions
        self.longest = 0  # no row has committed more; known to the host
        self.pending = 0  # nodes written after the committed positions
        self.numbers = torch.arange(0)  # of the columns

    @property
    def no_gaps(self) -> bool:
        """Whether gaps are impossible: one row, or nothing committed."""
        return self.longest == 0 or len(self.keys[0]) == 1

    def positions(self, num_nodes: int) -> torch.Tensor:
        """Positions [B, N] of new nodes that follow each other."""
        assert self.lengths is not None
        return self.lengths[:, None] + torch.arange(num_nodes, device=self.lengths.device)

    def mask(self, visible: torch.Tensor) -> torch.Tensor:
        """The bool mask [B or 1, 1, N, S] of a pass over N new nodes; makes room for them.

        `visible` [B or 1, N, pending + N] is which pending and new nodes each new node sees; every
        node sees all that its row has committed.
        """
        view = self.view(visible.shape[1])
        # All nodes see all that is committed, so only the nodes' own part needs a table.
        if self.no_gaps and len(view.room.seen) == self.longest + visible.shape[2]:
            return pad(visible, (self.longest, 0), value=True)[:, None]
        return view.mask(visible)

    def view(self, num_nodes: int, kernels: TreeKernels | None = None) -> CacheView:
        """The cache as a pass over N new nodes sees it; makes room for them, see `room`."""
        assert self.lengths is not None
        room = self.room(num_nodes, kernels)
        return CacheView(self.keys, self.values, self.lengths, room)

    def room(self, num_nodes: int, kernels: TreeKernels | None = None, skipped: int = 0) -> Room:
        """Room for N new nodes after `skipped` columns.

        With `kernels` these attend, where they take so many nodes.
        """
        start = self.longest + self.pending + skipped
        width = self.memory.seen(start + num_nodes)
        self._ensure(width)
        numbers = self._numbers()
        columns = numbers[start : start + num_nodes]
        if kernels is not None and self.pending + num_nodes <= kernels.most_nodes:
            # They read lengths: one graph serves any number of columns.
            return Room(numbers[:0], columns, self.pending, kernels)
        return Room(numbers[:width], columns)

    def _numbers(self) -> torch.Tensor:
        """The numbers of all columns, made once for each capacity."""
        if len(self.numbers) < self.keys[0].shape[2]:
            self.numbers = torch.arange(self.keys[0].shape[2], device=self.keys[0].device)
        return self.numbers

    def _ensure(self, columns: int) -> None:
        """Make room for `columns` and one more."""
        # A full cache has another layout in memory than any part of it: compiled layers would need
        # code of their own for it.
        if columns < self.keys[0].shape[2]:
            return
        self._enlarge(self._capacity(grown(columns), len(self.keys[0])))

    def _enlarge(self, capacity: int) -> None:
        """Go on in memory of that many columns, layer by layer."""
        stores, count = self._new_stores(len(self.keys[0]), capacity), len(self.keys)
        for layers, first in ((self.keys, 0), (self.values, count)):
            for layer, states in enumerate(layers):
                layers[layer] = enlarged(states, stores[first + layer])
        self.stores = stores

    def _capacity(self, columns: int, rows: int) -> int:
        """Columns to allocate for each of so many rows where `columns` are wanted."""
        column = sum(rows * s.shape[1] * s.shape[3] * s.element_size() for s in self.states)
        return self.memory.capacity(columns, column)

    def _new_stores(self, rows: int, capacity: int) -> FreshStores:
        """Zeroed memory for the keys of each layer, then for the values of each.

        What the cache had before is its own until `stores` is set.
        """
        old = self.states
        shapes = [(rows, states.shape[1], capacity, states.shape[3]) for states in old]
        return self.memory.take(shapes, old[0])

    def keep_pending(self, num_nodes: int) -> None:
        """The nodes of the last pass stay, so that another pass can follow them."""
        self.pending += num_nodes

    def discard(self) -> None:
        """Forget all pending nodes."""
        self.pending = 0

    def commit(
        self,
        path: torch.Tensor | None,  # [B, P] nodes to keep, in order; the rest of a row is ignored
        lengths: torch.Tensor,  # [B] committed positions after this commit
        longest: int,  # no row has more
    ) -> None:
        """Keep the nodes on the accepted path and forget the others.

        With 4 positions committed, nodes at columns 4 5 6 7, path (0, 2) and length 6, columns 4
        and 6 move to 4 and 5. Without a path the nodes to keep already are where they belong.
        """
        assert self.lengths is not None
        if path is not None:
            steps = torch.arange(path.shape[1], device=path.device)
            self.move(self.keys, self.values, self.longest + path, self.lengths[:, None] + steps)
        # Columns past `lengths` keep what they held: hidden by masks, overwritten by later nodes.
        self.lengths, self.longest, self.pending = lengths, longest, 0

    def keep_rows(self, rows: torch.Tensor, longest: int | None = None) -> None:
        """Continue with the rows [R] of the batch only; none of them is longer than `longest`.

        Without `longest` it is read from the device.
        """
        assert self.lengths is not None
        stores, count = self._new_stores(len(rows), self.keys[0].shape[2]), len(self.keys)
        self.keys, self.values = (
            [torch.index_select(states.detach(), 0, rows, out=stores[n]) for n, states in part]
            for part in (enumerate(self.keys), enumerate(self.values, count))
        )
        self.stores, self.lengths = stores, self.lengths[rows]
        self.longest = int(self.lengths.max()) if longest is None else longest

    def repeat_rows(self, rows: Sequence[int], first: int, num_nodes: int) -> None:
        """Row r goes on as a copy of row ``rows[r]``, in place.

        Both have the same in the columns before `first`, which are left alone. The `num_nodes`
        nodes of the last pass are copied too, so that `commit` can follow. Rows 0 0 2 copy row 0
        over row 1.
        """
        assert self.lengths is not None
        moved = [(row, place) for place, row in enumerate(rows) if row != place]
        if not moved:
            return
        sources, places = torch.tensor(moved, device=self.lengths.device).T
        end = self.longest + self.pending + num_nodes
        for states in self.states:
            states[places, :, first:end] = states[sources, :, first:end]
        self.lengths = self.lengths[torch.tensor(rows, device=self.lengths.device)]

    @property
    def held(self) -> Sequence[torch.Tensor]:
        """The memory [...] that committed positions take."""
        return self.states

    @property
    def cuts_anywhere(self) -> bool:
        """Whether it can be cut to any length."""
        return True

    def cuttable(self, length: int) -> int:
        """To how many positions, `length` at most, it can be cut."""
        return min(length, self.longest)

    def cut(self, length: int) -> None:
        """Forget what was committed after the first `length` positions of each row."""
        assert self.lengths is not None
        self.discard()
        # Nothing is freed or cleared: what follows the cut is hidden, then overwritten.
        self.lengths = self.lengths.clamp_max(length)
        self.longest = min(self.longest, length)

    def trim(self) -> None:
        """Give back the columns after the committed ones, until `untrim`.

        The memory of recorded passes goes back too: its sizes are those of caches in use.
        """
        if not self.keys or rounded(self.longest + 1, BLOCK) >= self.keys[0].shape[2]:
            return
        unused = rounded(self.longest + 1, BLOCK) - self.longest
        self.keys, self.values = (
            [pad(states[:, :, : self.longest], (0, 0, 0, unused)) for states in part]
            for part in (self.keys, self.values)
        )
        self.stores = None

    def untrim(self) -> None:
        """Have as many columns again as a cache in use."""
        if not self.keys:
            return
        capacity = self._capacity(self.longest + 1, len(self.keys[0]))
        if capacity > self.keys[0].shape[2]:
            self._enlarge(capacity)

    def join_rows(
        self, other: "ColumnCache", order: Sequence[int], longest: int | None = None
    ) -> None:
        """Continue with rows of both, see `RowState.join_rows`; neither has pending nodes.

        None of them is longer than `longest`. Where all rows that stay keep their places, only
        those of `other` are copied; but everything is where half of the columns or more would stay
        unused, since the longest rows have left.
        """
        assert self.lengths is not None and other.lengths is not None
        count = len(self.lengths)
        rows = torch.tensor(order, device=self.lengths.device)
        self.lengths = torch.cat([self.lengths, other.lengths])[rows]
        self.longest = longest or max(self.longest, other.longest)
        stay = [(row, place) for place, row in enumerate(order) if row < count]
        come = [(row - count, place) for place, row in enumerate(order) if row >= count]
        moved = len(order) != count or any(row != place for row, place in stay)
        if moved or self.keys[0].shape[2] >= 2 * self._capacity(grown(self.longest), len(order)):
            self._move_rows(torch.tensor(stay, device=rows.device), len(order))
        self._ensure(self.longest)
        moves = torch.tensor(come, device=rows.device)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for store, states in zip(mine, theirs, strict=True):
                # What a row that has left kept further on is hidden, not harmless: see `enlarged`.
                store[moves[:, 1], :, other.longest :] = 0
                put_rows(store, states, moves, other.longest)

    def collect(
        self, parts: Sequence["ColumnCache"], places: Sequence[Sequence[int]], room: int
    ) -> None:
        """Go on with copies of the rows of `parts` instead of those here.

        Row r of part p becomes row ``places[p][r]``: places (1,) and (2, 0) bring one row of the
        first part between two of the second. `room` is the number of columns to allocate beside
        the longest row.
        """
        rows = torch.tensor([place for group in places for place in group])
        lengths = torch.cat([part.lengths for part in parts if part.lengths is not None])
        self.lengths, self.longest = lengths[rows.argsort()], max(part.longest for part in parts)
        self.keys, self.values = parts[0].keys, parts[0].values  # for their shapes
        stores = self._new_stores(len(rows), self._capacity(self.longest + room + 1, len(rows)))
        moves = [torch.tensor([*enumerate(group)], device=lengths.device) for group in places]
        layers = []
        for number, of_parts in enumerate(zip(*(part.states for part in parts), strict=True)):
            layers.append(stores[number])
            for part, move, states in zip(parts, moves, of_parts, strict=True):
                put_rows(layers[-1], states, move, part.longest)
        count = len(self.keys)
        self.keys, self.values, self.stores = layers[:count], layers[count:], stores

    @property
    def states(self) -> Layers:
        """The keys of each layer, then the values of each."""
        return [*self.keys, *self.values]

    def _move_rows(self, moves: torch.Tensor, count: int) -> None:
        """Go on with `count` rows, of which some are old ones by `moves` [R, 2]; see `put_rows`."""
        stores = self._new_stores(count, self._capacity(grown(self.longest), count))
        layers = len(self.keys)
        for part, first in ((self.keys, 0), (self.values, layers)):
            for layer, states in enumerate(part):  # one at a time: its old memory is free again
                part[layer] = put_rows(stores[first + layer], states, moves, self.longest)
        self.stores = stores


def visible_columns(
    visible: torch.Tensor,  # [B or 1, N, M] bool: which of M nodes each of the last N sees
    lengths: torch.Tensor,  # [B] committed positions
    seen: torch.Tensor,  # [S] the numbers of the columns in use
    columns: torch.Tensor,  # [N] of the last N nodes, which follow the others
) -> torch.Tensor:
    """The mask [B, 1, N, S]: a node sees what its row has committed, and the nodes it may see.

    With 2 positions committed, nodes from column 3 on, and 6 columns in use, a node that sees the
    first of two nodes has the mask ``1 1 . 1 . .``.
    """
    count = visible.shape[-1]
    nodes = seen - columns[0] + (count - visible.shape[1])
    is_node = (nodes >= 0) & (nodes < count)
    among_nodes = visible.index_select(-1, nodes.clamp(0, count - 1)) & is_node
    committed = seen < lengths[:, None]  # [B, S]
    return (among_nodes | committed[:, None])[:, None]


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bool mask [...] as numbers that are added to attention scores: 0, or the least there is."""
    blocked = torch.finfo(dtype).min
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, blocked)


def rounded(columns: int, block: int) -> int:
    """The next multiple of `block`."""
    return -(-columns // block) * block


def grown(columns: int) -> int:
    """Columns that a cache wants which needs `columns` now and will need more."""
    return max(columns + 1, int(columns * GROWTH))


# Both are given zeros, not uninitialised memory: a masked column still takes part in sums, and
# 0 x NaN is NaN.
def enlarged(states: torch.Tensor, store: torch.Tensor) -> torch.Tensor:
    """Zeros `store` [B, H, capacity, D], which now begin with the states [B, H, T, D]."""
    store[:, :, : states.shape[2]] = states
    return store


def put_rows(
    store: torch.Tensor,  # [B', H, capacity, D]
    states: torch.Tensor,  # [B, H, C, D]
    moves: torch.Tensor,  # [R, 2] from which row, to which
    used: int,  # no row has more columns
) -> torch.Tensor:
    """`store` with copies of rows of the states."""
    rows, places = moves.T
    columns = min(used, states.shape[2], store.shape[2])
    store[places, :, :columns] = states[rows, :, :columns]
    return store
