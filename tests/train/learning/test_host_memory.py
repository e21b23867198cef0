"""Memory that training gives back to the system."""

import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from drafthead.train.learning.engines import CAPACITY, FEW_KERNELS, STEPS_BETWEEN, HostMemory

CPU = torch.device("cpu")
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
def test_what_was_freed_between_things_that_stay_goes_back_to_the_system() -> None:
    memory = HostMemory(CPU)
    if memory.trim is None:
        pytest.skip("this C library has no malloc_trim")
    blocks = [torch.ones(24_000) for _ in range(3000)]  # 96 kB each
    del blocks[:-1]  # the last one stays at the end of all of them
    held = resident()
    memory.after_step(STEPS_BETWEEN - 1)
    assert held - resident() < 1e6, "it is not due"
    memory.after_step(STEPS_BETWEEN)
    assert held - resident() > 200e6


def faults() -> int:
    """Pages that the system has cleared for this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries have no mallopt")
def test_large_blocks_are_kept_between_steps() -> None:
    if HostMemory(CPU).trim is None:
        pytest.skip("this C library has no mallopt")
    cleared = []
    for _ in range(8):
        before = faults()
        torch.ones(2**24).add_(1)  # 64 MiB
        cleared.append(faults() - before)
    assert sorted(cleared)[4] < 2**26 / PAGE / 16, "some of the first are new, none of the later"


def test_the_cache_of_kernels_is_limited_unless_the_user_has_set_its_size(monkeypatch) -> None:
    monkeypatch.setenv(CAPACITY, "1")  # so that its absence comes back after the test
    monkeypatch.delenv(CAPACITY)
    HostMemory(torch.device("meta"))
    assert CAPACITY not in os.environ
    HostMemory(CPU)
    assert os.environ[CAPACITY] == FEW_KERNELS
    monkeypatch.setenv(CAPACITY, "7")
    HostMemory(CPU)
    assert os.environ[CAPACITY] == "7"
