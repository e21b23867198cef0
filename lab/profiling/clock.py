"""Wall-clock seconds of one call, the device's work included."""

import time
from collections.abc import Callable

import torch


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds from the call until the device has finished what it started."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has finished when the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
