"""The tests of the kernels beside this file, in a process of their own; see conftest.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("tree_attention", "cpu"),
        ("commit", "cpu"),
        ("registration", "cpu"),
        ("decoding", "cpu"),
        ("compiled", "none"),
        pytest.param("tree_attention", "cuda", marks=pytest.mark.gpu),
        pytest.param("commit", "cuda", marks=pytest.mark.gpu),
        pytest.param("registration", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_kernels(name: str, device: str) -> None:
    pytest.importorskip("triton")
    tests = HERE / f"test_{name}.py"
    # The other conftest.py files load what takes seconds and what no kernel needs.
    options = "-qx", "-n0", "-pno:cacheprovider", f"--confcutdir={HERE}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tests)],
        env=os.environ | {"KERNELS_ON": device},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
