"""The kernels compiled for GPUs, without one: what calls bind and what kernels take up; see
conftest.py.
"""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
from stages import more
from tree_reference import Case, attended
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from drafthead.backends.cuda import tree_attention as module
from drafthead.backends.cuda.commit import CacheTable, commit
from drafthead.backends.cuda.kept_draws import first_kept
from drafthead.backends.cuda.tree_attention import Blocks

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
SHARED_MEMORY = 227 * 1024  # bytes that a block of an H100 can have
MEASURED = re.compile(r"(\d+) bytes spill stores.*Used (\d+) registers", re.DOTALL)


# Bytes that a block can have on chips of each kind, and one of that kind.
MOST_SHARED = {
    ("cuda", 80): 163 * 1024,  # A100
    ("cuda", 86): 99 * 1024,  # RTX 3090
    ("cuda", 89): 99 * 1024,  # RTX 4090
    ("cuda", 90): SHARED_MEMORY,
    ("cuda", 100): 227 * 1024,  # B200
    ("cuda", 120): 99 * 1024,  # RTX 5090
    ("hip", "gfx942"): 64 * 1024,  # MI300
}
FIRST = ("cuda", 86), ("hip", "gfx942")  # those with the least of their makers


class Chip(NamedTuple):
    """As much of Triton's driver as compiling needs."""

    kind: tuple[str, int | str] = ("cuda", 90)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(*self.kind, 64 if self.kind[0] == "hip" else 32)

    def get_current_device(self) -> str:
        return repr(self)  # Triton keeps kernels by device

    def get_current_stream(self, device: str) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path) -> list:
    """The kernels of all launches from now on, which are compiled only."""
    kernels: list = []
    run = JITFunction.run

    def compiling(self, *args, grid, warmup, **kwargs):
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compiling)
    monkeypatch.setattr(driver, "_active", Chip())
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(module, "shared_memory", lambda device: SHARED_MEMORY)
    return kernels


def check_resources(kernel, folder: Path) -> None:
    """No registers are spilt to memory, and shared memory suffices."""
    source = folder / "kernel.ptx"
    source.write_text(kernel.asm["ptx"])
    command = PTXAS, "-v", "--gpu-name=sm_90a", source, "-o", folder / "kernel.cubin"
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = MEASURED.search(report)
    assert found and int(found[1]) == 0, report
    assert kernel.metadata.shared <= SHARED_MEMORY


@pytest.mark.parametrize(
    ("dtype", "head_size", "nodes", "rows"),
    [
        (torch.bfloat16, 128, 1, 1),
        more(torch.bfloat16, 128, 16, 264),  # so many that columns are not split
        (torch.bfloat16, 256, 16, 1),
        more(torch.float32, 128, 16, 1),
    ],
)
def test_attention_spills_no_registers(
    dtype: torch.dtype, head_size: int, nodes: int, rows: int, compiled: list, tmp_path: Path
) -> None:
    everything = dict(window=9, softcap=1.0, with_sinks=True, pending=3, gaps=True)
    lengths = (1,) * rows
    attended(Case(3, 1, nodes, head_size, lengths, capacity=32, dtype=dtype, **everything))
    assert len(compiled) == (2 if rows == 1 else 1)
    for kernel in compiled:
        check_resources(kernel, tmp_path)


@pytest.mark.parametrize("head_size", [more(128), 256])
@pytest.mark.parametrize(
    "chip",
    [c if c in FIRST else more(c) for c in MOST_SHARED],
    ids=[str(name) for _, name in MOST_SHARED],
)
def test_attention_fits_into_the_memory_of_every_chip(
    chip: tuple[str, int | str], head_size: int, compiled: list, monkeypatch
) -> None:
    """The widest programs, those of Llama and of Gemma, of trees with 64 nodes."""
    monkeypatch.setattr(driver, "_active", Chip(chip))
    monkeypatch.setattr(module, "shared_memory", lambda device: MOST_SHARED[chip])
    attended(Case(2, 1, 64, head_size, (1,), dtype=torch.bfloat16, window=9, gaps=True))
    assert compiled[0].metadata.shared <= MOST_SHARED[chip]


def test_one_kernel_serves_all_numbers_of_nodes(compiled: list) -> None:
    """Others would be compiled while an answer is decoded."""
    blocks = Blocks(splits=4, least=16, rows=16, columns=16, warps=4, stages=2)
    for nodes, gaps in ((1, False), (2, True), (16, False)):
        attended(Case(heads=2, nodes=nodes, gaps=gaps, dtype=torch.bfloat16), blocks)
    assert len({id(kernel) for kernel in compiled}) == 2


def test_moves_spill_no_registers(compiled: list, tmp_path: Path) -> None:
    states = [torch.zeros(2, 8, 64, 128, dtype=torch.bfloat16) for _ in range(4)]
    numbers = torch.ones(2, dtype=torch.long)
    commit(CacheTable(states), torch.zeros(2, 16, dtype=torch.long), numbers, numbers)
    check_resources(*compiled, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, more(torch.float32)])
def test_draws_spill_no_registers(dtype: torch.dtype, compiled: list, tmp_path: Path) -> None:
    logits = torch.zeros(1, 4, 128_256, dtype=dtype)
    speeds = logits.float()
    first_kept(logits, speeds[..., :1], speeds, torch.ones(1, 4))
    check_resources(*compiled, tmp_path)
