"""Memory in large pages, of which a thread can touch some before it is needed.

A system clears pages when they are first touched. A virtual machine may also have to get each from
its host, at half a gigabyte a second, by one thread or by several: that takes longer than packing.
So memory for packed weights is touched while Python imports libraries. This file imports none.
"""

import ctypes
import mmap
from contextlib import suppress
from threading import Thread

PAGE = 2 * 2**20
TOUCHED = 8 * PAGE  # at a time


def new_mapping(size: int) -> mmap.mmap:
    """At least `size` bytes from the first page on, which nobody has: untouched, if not ahead."""
    if (given := ahead.taken()) is not None and len(given) >= size + PAGE:
        return given
    mapping = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages refuses: they stay as they are
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class Ahead:
    """A mapping that a thread touches until somebody takes it."""

    mapping: mmap.mmap | None = None

    def touch(self, size: int) -> None:
        """Begin to touch `size` bytes of a new mapping, which has room for more."""
        if hasattr(mmap, "MADV_HUGEPAGE"):  # only Linux has it
            self.mapping = new_mapping(2 * size)
            self.thread = Thread(target=self.run, args=(self.mapping, size), daemon=True)
            self.thread.start()

    def run(self, mapping: mmap.mmap, size: int) -> None:
        """Write zeros, without the interpreter's lock."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        start += -start % PAGE
        for place in range(0, size, TOUCHED):
            if self.mapping is not mapping:
                return
            ctypes.memset(start + place, 0, min(TOUCHED, size - place))

    def taken(self) -> mmap.mmap | None:
        """The mapping, which is not touched any more; None where there is none."""
        found, self.mapping = self.mapping, None
        if found is not None:
            self.thread.join()
        return found


ahead = Ahead()
