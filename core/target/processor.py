"""The abilities of this processor, and the threads that share its work."""

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Instructions that multiply bfloat16 numbers, by torch's name, the best first: of x86, and of Arm.
BFLOAT16 = {"amx_bf16": "AMX", "avx512_bf16": "BF16", "bf16": "BF16"}
PAUSE_HARD = 2  # OpenMP's number for it


def openmp() -> ctypes.CDLL | None:
    """Torch's own OpenMP; None where it is another library."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        return ctypes.CDLL(str(path))
    return None


OPENMP = openmp()


def end_helpers() -> None:
    """End the threads that help the calling one with its operations; the next makes new ones.

    Each thread that computes has helpers of its own. With more of all these than processors OpenMP
    no longer waits by counting, and every operation has to wake its helpers: decoding in a second
    thread is much slower then.
    """
    if OPENMP is not None and hasattr(OPENMP, "omp_pause_resource_all"):
        OPENMP.omp_pause_resource_all(PAUSE_HARD)


def instructions() -> str:
    """The widest instructions that torch uses, and those for bfloat16, as `AVX512-BF16`."""
    return "-".join([torch.backends.cpu.get_cpu_capability(), *bfloat16_instructions()[:1]])


def bfloat16_instructions() -> list[str]:
    """The instructions that multiply bfloat16 numbers, the best first.

    Without any torch converts each number, so that products take many times as long as in float32.
    """
    found = torch.cpu.get_capabilities()
    return [label for name, label in BFLOAT16.items() if found.get(name, False)]


@cache
def tell_of_slow_bfloat16(device: torch.device, dtype: torch.dtype) -> None:
    """Say, once in a process, that a model of this type takes long to read prompts."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not bfloat16_instructions():
        logger.warning(
            "this processor has no instructions for bfloat16, so prompts are read many times more "
            "slowly than in float32: a C++ compiler brings kernels for it, or use float32 "
            "(--dtype float32)"
        )
