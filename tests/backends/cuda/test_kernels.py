"""The tests of the kernels beside this file, in a process of their own; see conftest.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stages import more

HERE = Path(__file__).parent
KERNELS = ["tree_attention", "commit", "largest", "kept_draws", "registration"]


@pytest.mark.parametrize(
    ("device", "names", "marked"),
    [
        ("cpu", [*KERNELS, "decoding"], "not thorough"),
        ("none", ["compiled"], "not thorough"),
        more("cpu", [*KERNELS, "decoding"], "thorough"),
        more("none", ["compiled"], "thorough"),
        pytest.param("cuda", KERNELS, "", marks=pytest.mark.gpu),
    ],
    ids=["interpreted", "compiled", "others interpreted", "others compiled", "on a GPU"],
)
def test_kernels(device: str, names: list[str], marked: str) -> None:
    """All of a device in one process: starting one takes longer than most of these tests."""
    pytest.importorskip("triton")
    tests = [str(HERE / f"test_{name}.py") for name in names]
    # The other conftest.py files load what takes seconds and what no kernel needs.
    options = "-qx", "-n0", "-pno:cacheprovider", f"--confcutdir={HERE}", f"-m{marked}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        env=os.environ | {"KERNELS_ON": device},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
