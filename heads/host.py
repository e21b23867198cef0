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


def to_device(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """The tensor [...] of nested lists of numbers, on a device, without waiting for it.

    A copy from memory that the system may move waits until all work before it is done.
    """
    there = torch.tensor(numbers)
    if device.type != "cuda":
        return there.to(device)
    return there.pin_memory().to(device, non_blocking=True)
