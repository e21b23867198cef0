"""The kernels that all graphs share: compiled once, kept, and found by code of other processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drafthead.backends.compiled import Compiled, has_kernels
from drafthead.backends.cpu.kernels import library

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no kernels for this processor")


def library_of_a_product() -> Path:
    """Where the library lies that a graph with a product of its own size calls, in this process."""
    layer = nn.Linear(64, 72).bfloat16().requires_grad_(False)
    product = Compiled(lambda x: layer(x), torch.device("cpu"), torch.bfloat16, {"x": "B ."})
    with torch.inference_mode():
        x = torch.randn(3, 64).bfloat16()
        torch.testing.assert_close(product(x), layer(x), atol=0.02, rtol=0.02)
    return library.path_of(library.text())


def test_graphs_of_other_processes_find_the_library_that_one_has_compiled() -> None:
    here = library_of_a_product()
    written = here.stat().st_mtime_ns
    there = subprocess.run([sys.executable, __file__], check=True, capture_output=True, text=True)
    assert there.stdout.split() == [str(here)]
    assert here.stat().st_mtime_ns == written


if __name__ == "__main__":
    print(library_of_a_product())
