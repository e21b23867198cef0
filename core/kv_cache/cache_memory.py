"""Few sizes, and memory that is used again: a CUDA graph is recorded for shapes and addresses.

The cache of a new request gets the memory of an ended one of the same shape, so that the graphs
that were recorded for that one serve it too.
"""

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple
from weakref import WeakSet, finalize

import torch

from drafthead.core.kv_cache.column_cache import BLOCK, FRESH, FreshMemory, FreshStores, Shape

# Unused memory that is kept, as a multiple of what was in use at the most. A cache that grows by
# half at least each time leaves behind at most twice what it ends with. So many bytes are kept in
# any case: they are a small part of any device, and recordings go with their memory.
MOST_UNUSED, ALWAYS_KEPT = 2, 2**28
# Share of a device's memory that a cache may take up from the beginning, and the most columns: a
# text that outgrows its cache is recorded again, and columns that stay empty cost no time.
FIRST_SHARE, MOST_AT_FIRST = 1 / 64, 4096
# Where passes are recorded, short texts get this many columns too: fewer capacities, recordings.
LEAST_RECORDED = 4 * BLOCK


class Lease(FreshStores):
    """Memory in use by one cache. It counts as unused once nobody holds this object."""

    def __init__(self, stores: list[torch.Tensor]):
        self.stores = stores

    def __getitem__(self, place: int) -> torch.Tensor:
        """The tensor of the shape at a place."""
        return self.stores[place]


class Unused(NamedTuple):
    """A set of tensors that no cache uses."""

    made_for: object  # see `made_for`
    stores: list[torch.Tensor]


class CacheMemory(FreshMemory):
    """Sets of tensors that caches take and leave; several threads may."""

    is_recorded = True

    def __init__(self, total: int = 0) -> None:
        """`total` are the bytes of the device's memory; 0 where that does not matter."""
        self.total = total
        self.unused: list[Unused] = []  # those that were left last are at the end
        self.leases: WeakSet[Lease] = WeakSet()
        self.lock = Lock()
        self.most_in_use = 0  # bytes
        self.sets_made = 0

    @staticmethod
    def on(device: torch.device) -> FreshMemory:
        """Memory for caches on a device: on a GPU, where graphs are recorded, one to use again."""
        if device.type != "cuda":
            return FRESH
        return CacheMemory(torch.cuda.get_device_properties(device).total_memory)

    def size(self, count: int) -> int:
        return power_of_two(count)

    def seen(self, end: int) -> int:
        return in_steps(end, BLOCK)

    def capacity(self, columns: int, column: int) -> int:
        at_first = int(self.total * FIRST_SHARE / max(column, 1))
        at_first = min(MOST_AT_FIRST, 1 << at_first.bit_length() >> 1)
        return in_steps(max(columns, LEAST_RECORDED, at_first), BLOCK)

    def take(self, shapes: Sequence[Shape], like: torch.Tensor) -> Lease:  # [...]
        wanted = made_for(shapes, like)
        with self.lock:
            stores = self._left(wanted)
            if stores is None:
                stores = self._made(FreshStores(shapes, like), len(shapes))
            else:
                for store in stores:
                    store.zero_()
            lease = Lease(stores)
            self.leases.add(lease)
        # Called by the garbage collector, perhaps within this method: it may not take the lock.
        finalize(lease, self.unused.append, Unused(wanted, stores)).atexit = False
        return lease

    def _left(self, wanted: object) -> list[torch.Tensor] | None:
        """A set that a cache has left, the latest one; None where there is none."""
        for place in reversed(range(len(self.unused))):
            if self.unused[place].made_for == wanted:
                return self.unused.pop(place).stores
        return None

    def _made(self, fresh: FreshStores, count: int) -> list[torch.Tensor]:
        """A new set of tensors; what has not been used for longest is freed for it."""
        self.sets_made += 1
        with torch.inference_mode(False):  # a later request may be outside of that mode
            try:
                stores = [fresh[place] for place in range(count)]
            except torch.OutOfMemoryError:
                self.unused.clear()
                stores = [fresh[place] for place in range(count)]
        in_use = sum(bytes_of(lease.stores) for lease in self.leases) + bytes_of(stores)
        self.most_in_use = max(self.most_in_use, in_use)
        most = max(MOST_UNUSED * self.most_in_use, ALWAYS_KEPT)
        while sum(bytes_of(s.stores) for s in [*self.unused]) > most:
            self.unused.pop(0)
        return stores


def made_for(shapes: Sequence[Shape], like: torch.Tensor) -> object:
    """The properties in which a set of tensors like one [...] must agree to be used again.

    On a GPU also in the stream: work of another one may still read what a cache has left.
    """
    stream = torch.cuda.current_stream(like.device) if like.is_cuda else None
    return tuple(shapes), like.dtype, like.device, stream


def bytes_of(stores: Sequence[torch.Tensor]) -> int:
    """The size of tensors [...] together."""
    return sum(store.nbytes for store in stores)


def power_of_two(count: int) -> int:
    """The next of 1, 2, 4, 8, ..."""
    return 1 << (count - 1).bit_length()


def in_steps(count: int, unit: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... units: at most half more than `count`, beyond
    the first unit.

    With a unit of 128, 300 are 384 and 1300 are 1536.
    """
    units = -(-count // unit)
    doubled = power_of_two(units)
    between = doubled * 3 // 4
    return unit * (between if between >= units else doubled)
