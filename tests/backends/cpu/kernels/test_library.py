"""The kernels are compiled once, for the best set that can run or the one that the user names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drafthead.backends.cpu.kernels import library
from drafthead.backends.cpu.kernels.kernel_set import (
    AMX,
    AVX2,
    AVX512,
    SETS,
    VARIABLE,
    kernel_set,
    runnable,
)
from drafthead.core.errors import UserError

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")


def test_a_library_that_one_process_has_compiled_is_taken_by_the_next(monkeypatch) -> None:
    path = library.path_of(library.text())
    written = path.stat().st_mtime_ns
    monkeypatch.setattr(library, "compile_library", None)
    library.loaded.cache_clear()
    assert library.loaded() and path.stat().st_mtime_ns == written
    other = library.path_of(library.text() + "// of another version")
    assert other != path and not other.exists()


def test_libraries_of_all_sets_lie_side_by_side(monkeypatch) -> None:
    names = set()
    for name in SETS:
        monkeypatch.setattr(library, "kernel_set", lambda name=name: name)
        names.add(library.name_of(library.text()))
    assert len(names) == len(SETS)


@pytest.fixture
def processor(monkeypatch):
    """Makes this machine one that has some instructions, and lets a process use tiles or not."""

    def has(*instructions: str, tiles: bool = True) -> None:
        found = dict.fromkeys(("avx2", "fma3", *instructions), True)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda: tiles)

    return has


@pytest.mark.parametrize("name", SETS)
def test_a_processor_gets_the_first_set_whose_instructions_it_has(
    monkeypatch, processor, name
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    processor(*SETS[name].instructions)
    assert kernel_set.__wrapped__() == name
    monkeypatch.setenv(VARIABLE, AVX2)
    assert kernel_set.__wrapped__() == AVX2
    monkeypatch.setenv(VARIABLE, "none")
    assert kernel_set.__wrapped__() is None


def test_a_system_may_refuse_tiles(monkeypatch, processor) -> None:
    processor(*SETS[AMX].instructions, tiles=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert kernel_set.__wrapped__() == "avx512bf16"
    monkeypatch.setenv(VARIABLE, AMX)
    with pytest.raises(UserError, match="leave to use tiles.*use avx512bf16, avx512vnni"):
        kernel_set.__wrapped__()


def test_a_set_that_cannot_run_and_one_that_is_none_are_refused(monkeypatch, processor) -> None:
    processor()
    for wanted, sentence in {
        AVX512: "=avx512 needs what this machine lacks .avx512_f, .*: use avx2, none",
        "avx3": "=avx3 is none of amx, avx512bf16, avx512vnni, avx512, avxvnni, avx2 and none",
    }.items():
        monkeypatch.setenv(VARIABLE, wanted)
        with pytest.raises(UserError, match=sentence):
            kernel_set.__wrapped__()


@pytest.mark.thorough
@pytest.mark.parametrize("name", SETS)
def test_kernels_of_each_set_compile(name, monkeypatch, tmp_path) -> None:
    """Also those that this processor cannot run, which no other test looks at."""
    monkeypatch.setattr(library, "kernel_set", lambda: name)
    source = tmp_path / "operations.cpp"
    source.write_text(library.text())
    command = [*library.command(source, tmp_path / "none"), "-fsyntax-only"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("name", SETS)
def test_kernels_of_each_set_hold_what_those_of_the_best_do(name) -> None:
    """All tests of kernels in one process for each set that this processor can run."""
    if name == kernel_set() or name not in runnable():
        pytest.skip("the other tests have tried it" if name == kernel_set() else "it cannot run")
    folder = Path(__file__).parent
    tests = map(str, (folder, folder.parent / "test_packed.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=os.environ | {VARIABLE: name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr
