"""Memory of a process that trains on a CPU: what would otherwise grow for some hundred steps.

Micro-batches have many shapes. The allocator keeps what it was given back in pieces of all sizes,
and oneDNN keeps a compiled kernel for each shape, up to 1,024 of them.
"""

import ctypes
import os

import torch

FEW_KERNELS = "64"
# What was given back has to be asked for again, which takes up to a tenth of a step.
STEPS_BETWEEN = 8
CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"  # read once, at the first product


class HostMemory:
    """Gives back, every few steps, what the allocator holds; on other devices it does nothing."""

    def __init__(self, device: torch.device):
        """Before anything is computed: a capacity that the user has set stays as it is."""
        self.trim = None
        if device.type == "cpu":
            os.environ.setdefault(CAPACITY, FEW_KERNELS)
            # In glibc; other C libraries hold less, or have no such function.
            self.trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def after_step(self, step: int) -> None:
        """Give free memory back to the system, if that is due."""
        if self.trim is not None and step % STEPS_BETWEEN == 0:
            self.trim(0)
