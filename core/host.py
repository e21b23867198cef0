"""Numbers between host and device: reading them is all that the host has to wait for in a step."""

from collections.abc import Sequence
from typing import Any

import torch


def to_host(numbers: torch.Tensor) -> list[Any]:
    """The numbers [...] of a tensor as nested lists.

    On a GPU this waits until all work before it is done. So a step does it once, and everything
    that a decode loop reads from the device comes through here: a test counts the calls.
    """
    return numbers.tolist()


class Arriving:
    """Numbers of a tensor on their way to the host, which may ask the device for more meanwhile."""

    def __init__(self, numbers: torch.Tensor):
        self.numbers, self.done = numbers, None
        if numbers.device.type == "cuda":
            self.numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.done = torch.cuda.Event()
            self.done.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[Any]:
        """The numbers as nested lists; waits for the work before them alone."""
        if self.done is not None:
            self.done.synchronize()
        return to_host(self.numbers)


def to_device(
    numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The tensor [...] of nested lists of numbers, on a device, without waiting for it.

    A copy from memory that the system may move waits until all work before it is done.
    """
    there = torch.tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return there.to(device)
    return there.pin_memory().to(device, non_blocking=True)
