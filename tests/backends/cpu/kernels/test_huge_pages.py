"""Memory for packed weights: copies in large pages, apart from each other, as long as needed."""

import mmap
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from drafthead.backends.cpu.kernels.packing import CACHE_LINE, MAPPING, PAGE, HugePages


@pytest.fixture(params=["large pages", "refused by the kernel", "unknown to the system"])
def memory(request, monkeypatch) -> HugePages:
    """Memory on systems with large pages and without."""
    if request.param == "refused by the kernel":
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1, raising=False)  # madvise raises OSError
    elif request.param == "unknown to the system":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    return HugePages()


def weights() -> list[torch.Tensor]:
    """Small ones, one of an odd size, and one that no mapping of the usual size holds."""
    small = [torch.randn(5, 7).bfloat16(), torch.randn(64, 3), torch.randn(PAGE, 2).bfloat16()]
    return [*small, torch.arange(MAPPING + 1, dtype=torch.int8)]


def test_copies_equal_their_tensors_and_outlive_the_memory_that_gave_them(memory) -> None:
    tensors = weights()
    copies = [memory.copy(tensor) for tensor in tensors]
    del memory
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.is_contiguous()
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)


def test_copies_share_no_cache_line() -> None:
    memory = HugePages()
    copies = [memory.copy(tensor) for tensor in weights()]
    places = sorted((copy.data_ptr(), copy.nbytes) for copy in copies)
    assert all(start % CACHE_LINE == 0 for start, _ in places)
    for (start, size), (following, _) in pairwise(places):
        assert start + size <= following


def test_small_tensors_follow_each_other_in_pages() -> None:
    memory = HugePages()
    first, second = (memory.copy(torch.ones(32)) for _ in range(2))
    assert first.data_ptr() % PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 2 * CACHE_LINE


def mapping_of(address: int) -> tuple[str, list[str]]:
    """Permissions and flags of this process's mapping that holds an address, by Linux."""
    permissions, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name:  # a mapping begins: first-last permissions ...
            first, last = (int(end, 16) for end in name.split("-"))
            permissions, inside = rest[0], first <= address < last
        elif inside and name == "VmFlags:":
            return permissions, rest
    raise AssertionError("no mapping holds the address")


@pytest.mark.skipif(
    not (sys.platform == "linux" and Path("/sys/kernel/mm/transparent_hugepage").exists()),
    reason="no Linux with large pages",
)
def test_the_kernel_is_asked_for_large_pages_of_this_process_alone() -> None:
    """It gives none to mappings that processes could share."""
    copy = HugePages().copy(torch.ones(PAGE))
    permissions, flags = mapping_of(copy.data_ptr())
    assert permissions == "rw-p" and "hg" in flags
