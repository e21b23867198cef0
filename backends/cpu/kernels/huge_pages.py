"""Memory for packed weights in pages of 2 MiB, where the system has them.

A pass reads each weight once, so its speed is that of fetching memory in order. Processors fetch
ahead only within a page, and find each new page by a walk through tables, in a virtual machine by
many: with the usual pages of 4 KiB a stream of reads is a good deal slower than with large ones.
"""

import mmap
from contextlib import suppress

import torch

PAGE, CACHE_LINE = 2 * 2**20, 64
# Weights share mappings of at least this size, of which only what is used takes memory.
MAPPING = 256 * 2**20


class HugePages:
    """Hands out memory [bytes] for tensors, one after the other.

    A mapping is freed with the last of its tensors, but not before the next one begins.
    """

    def __init__(self) -> None:
        self.left = torch.empty(0, dtype=torch.uint8)  # of the current mapping

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a CPU tensor, contiguous, in large pages where there are any."""
        size = -(-tensor.nbytes // CACHE_LINE) * CACHE_LINE  # of which tensors share none
        if size > self.left.numel():
            self.left = new_mapping(max(MAPPING, size))
        memory, self.left = self.left[:size], self.left[size:]
        values = memory[: tensor.nbytes].view(tensor.dtype)
        return values.view(tensor.shape).copy_(tensor)


def new_mapping(size: int) -> torch.Tensor:
    """At least `size` bytes of untouched memory [bytes], which begin with a page."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # only Linux has it
        return torch.empty(size, dtype=torch.uint8)
    mapping = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages refuses: they stay as they are
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :]
