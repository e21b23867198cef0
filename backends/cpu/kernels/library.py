"""The kernels of this processor, compiled once for all models.

`python -m drafthead.backends.cpu.kernels.library`, a part of `make install`, compiles them into
this folder; else they are compiled when they are first needed, into the user's cache.
"""

import hashlib
import logging
import os
import re
import subprocess
from collections.abc import Callable
from ctypes import CDLL
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from drafthead.backends.cpu.kernels import operations  # noqa: F401  (makes them known to torch)
from drafthead.backends.cpu.kernels.kernel_set import AVX512, SETS, kernel_set
from drafthead.core.backend import BACKENDS
from drafthead.core.storage.disk_cache import cache_or_scratch

BUILT = Path(__file__).parent / "built"  # with the project, not in git
SOURCE, INCLUDED = Path(__file__).parent / "source", Path(torch.__file__).parent
FLAGS = (
    *("-O3", "-DNDEBUG", "-std=c++20", "-shared", "-fPIC", "-fopenmp"),
    # Each number is rounded as the source says.
    *("-fno-math-errno", "-ffp-contract=off", "-fno-tree-loop-vectorize"),
    *("-mavx2", "-mfma", "-mf16c", "-mpopcnt", "-mlzcnt", "-mbmi", "-mbmi2"),
)

logger = logging.getLogger(__name__)


def text_of(name: str) -> str:
    """The text of a file of `source/`, with that of the files that it includes.

    A file in a folder for the processor's instructions takes the place of one that is for all.
    """
    places = [SOURCE / folder / name for folder in (*SETS[str(kernel_set())].folders, "")]
    text = next(path for path in places if path.exists()).read_text()
    return re.sub(r'#include "(.*)"\n', lambda include: text_of(include[1]), text)


def text() -> str:
    """The C++ of the library."""
    return text_of("operations.cpp")


def name_of(source: str) -> str:
    """The file of the library of this source."""
    parts = [torch.__version__, source, *command(Path("-"), Path("-"))]
    return f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.so"


def path_of(source: str) -> Path:
    """The path of this source's library, which may be missing."""
    built = BUILT / name_of(source)
    return built if built.exists() else cache_or_scratch("library") / built.name


def command(source: Path, library: Path) -> list[str]:
    """The command that compiles the library."""
    chosen = SETS[str(kernel_set())]
    widest = "AVX512" if AVX512 in chosen.folders else "AVX2"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    include = INCLUDED / "include"
    return [
        *(os.environ.get("CXX", "g++"), *FLAGS, *chosen.flags),
        *(f"-DCPU_CAPABILITY_{widest}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *(f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"),
        *(str(source), "-o", str(library)),
        *(f"-L{INCLUDED / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]


@cache
def loaded() -> bool:
    """Whether the kernels run in this process: compiled if need be, and made known to torch.

    Where they cannot be, one line says why.
    """
    if kernel_set() is None:
        return False
    path = path_of(text())
    try:
        if not path.exists():
            compile_library(text(), path)
        CDLL(str(path))  # torch then knows the operations
    except OSError as error:
        logger.warning(
            "PyTorch's kernels are used, so 16-bit text can differ at near-ties: %s", error
        )
        return False
    return True


def kernel_of(name: str) -> Callable[..., Any] | None:
    """Our kernel of that name; None where there is none."""
    return getattr(torch.ops.drafthead, name) if loaded() else None


BACKENDS["kernel"] = kernel_of


def compile_library(code: str, path: Path) -> None:
    """Compile the library; raises OSError where that fails."""
    logger.warning("building the CPU kernels, once on this machine: about 45 seconds")
    with TemporaryDirectory(dir=path.parent) as folder:
        source, made = Path(folder) / "operations.cpp", Path(folder) / path.name
        source.write_text(code)
        done = subprocess.run(command(source, made), capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            raise OSError(f"{os.environ.get('CXX', 'g++')}: {(errors or ['it failed'])[0]}")
        made.replace(path)  # whole, should another process read it


if __name__ == "__main__":
    BUILT.mkdir(exist_ok=True)
    if kernel_set() is not None and not (BUILT / name_of(text())).exists():
        compile_library(text(), BUILT / name_of(text()))
