"""The kernels that all graphs share are compiled once, for the widest set that may be used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drafthead.backends.cpu.kernels import library
from drafthead.backends.cpu.kernels.kernel_set import AMX, AVX2, AVX512, kernel_set

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")


def test_a_library_that_one_process_has_compiled_is_taken_by_the_next(monkeypatch) -> None:
    path = library.path_of(library.text())
    written = path.stat().st_mtime_ns
    monkeypatch.setattr(library, "compile_library", None)
    library.loaded.cache_clear()
    assert library.loaded() and path.stat().st_mtime_ns == written
    other = library.path_of(library.text() + "// of another version")
    assert other != path and not other.exists()


BFLOAT16 = {"avx512_bf16": True, "amx_bf16": False}
TILES = BFLOAT16 | {"amx_bf16": True}


@pytest.mark.parametrize(
    ("widest", "has", "wanted", "allowed", "expected"),
    [
        ("AVX512", TILES, "", True, AMX),
        ("AVX512", TILES, "", False, AVX512),  # the system refuses
        ("AVX512", TILES, "avx512", True, AVX512),
        ("AVX512", BFLOAT16, "", True, AVX512),
        ("AVX512", {}, "", True, AVX2),
        ("AVX2", TILES, "avx2", True, AVX2),
        ("DEFAULT", TILES, "default", True, None),
    ],
)
def test_the_set_is_the_widest_that_processor_system_and_user_allow(
    monkeypatch, widest: str, has: dict[str, bool], wanted: str, allowed: bool, expected: str | None
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: widest)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: allowed)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", wanted)
    assert kernel_set.__wrapped__() == expected


@pytest.mark.thorough
@pytest.mark.parametrize("lower", [AVX512, AVX2])
def test_kernels_of_a_lower_set_hold_what_those_of_the_widest_do(lower) -> None:
    if lower in (kernel_set(), None) or kernel_set() == AVX2:
        pytest.skip("the other tests have tried it")
    names = ("linear", "gated_mlp", "attention")
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    script = (
        "import sys, pytest; from drafthead.backends.cpu.kernels.kernel_set import kernel_set; "
        f"assert kernel_set() == {lower!r}; sys.exit(pytest.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "-q", "-p", "no:cacheprovider", *files],
        env=os.environ | {"ATEN_CPU_CAPABILITY": lower},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr
