"""The tests of the kernels beside this file, in a process of their own; see conftest.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kernels", ["tree_attention", "commit"])
def test_kernels(kernels: str, device: str) -> None:
    pytest.importorskip("triton")
    tests = HERE / f"test_{kernels}.py"
    # The other conftest.py files load what takes seconds and what no kernel needs.
    options = "-qx", "-n0", "-pno:cacheprovider", f"--confcutdir={HERE}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tests)],
        env=os.environ | {"KERNELS_ON": device},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
