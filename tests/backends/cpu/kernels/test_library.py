"""The kernels that all graphs share: compiled once, kept, and found by code of other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafthead.backends.compiled import has_kernels

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no kernels for this processor")
PROGRAM = """
import sys
import torch
from torch import nn
from drafthead.backends.compiled import Compiled

columns = int(sys.argv[1])
layer = nn.Linear(64, columns).bfloat16().requires_grad_(False)
product = Compiled(lambda x: layer(x), torch.device("cpu"), torch.bfloat16, {"x": "B ."})
with torch.inference_mode():
    x = torch.randn(3, 64).bfloat16()
    torch.testing.assert_close(product(x), layer(x), atol=0.02, rtol=0.02)
"""


def machine_code_after(folder: Path, columns: int) -> dict[Path, int]:
    """What is in a cache folder after a process has multiplied with a weight of that size: files,
    and when they were written.
    """
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    program = [sys.executable, "-c", PROGRAM, str(columns)]
    subprocess.run(program, check=True, env=environment)
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.so")}


def test_graphs_of_other_processes_find_the_library_that_one_has_compiled(tmp_path) -> None:
    first = machine_code_after(tmp_path, 40)
    second = machine_code_after(tmp_path, 72)
    assert first.items() <= second.items()
    assert len(second) == len(first) + 1  # a graph
