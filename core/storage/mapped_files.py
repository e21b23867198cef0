"""Memory that the system gets back: pages of files that tensors read where they lie, and what was
freed.

A page that was read once counts as a process's own until the system needs it: weights that were
packed out of a file would take memory twice.
"""

import ctypes
import mmap
import weakref
from pathlib import Path

import torch

# The mappings that tensors still read, with their addresses.
mapped: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()


def map_file(path: Path) -> mmap.mmap:
    """A file as memory: `torch.frombuffer` makes tensors of it."""
    with path.open("rb") as file:
        # Torch wants memory that can be written; what is written here never is in the file.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    mapped[content] = torch.frombuffer(content, dtype=torch.uint8).data_ptr()
    return content


def let_go(tensor: torch.Tensor) -> None:
    """Free the pages of a contiguous tensor [...] in a mapped file, which are read again where they
    are wanted; nothing for tensors elsewhere.
    """
    for content, start in [*mapped.items()]:
        first = tensor.data_ptr() - start
        if 0 <= first < len(content):
            begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE  # the page before has others, too
            size = first + tensor.nbytes - begin
            if size >= mmap.PAGESIZE:
                content.madvise(mmap.MADV_DONTNEED, begin, size // mmap.PAGESIZE * mmap.PAGESIZE)


def give_back() -> None:
    """Give the system what was freed and glibc keeps: reading a tokenizer leaves 100 MB."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
