"""Reading numbers off the device: the one thing in a step that the host has to wait for."""

from typing import Any

import torch


def to_host(numbers: torch.Tensor) -> list[Any]:
    """The numbers [...] of a tensor as nested lists.

    On a GPU this waits until all work before it is done. So a step does it once, and everything
    that a decode loop reads from the device comes through here: a test counts the calls.
    """
    return numbers.tolist()
