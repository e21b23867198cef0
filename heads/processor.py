"""What this processor can do."""

import logging
from functools import cache

import torch

logger = logging.getLogger(__name__)

# torch's names of instructions that multiply bfloat16 numbers: of x86, and of Arm.
INSTRUCTIONS = "avx512_bf16", "amx_bf16", "bf16"


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16 numbers.

    Without them torch converts each number, which takes about ten times as long as float32.
    """
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in INSTRUCTIONS)


@cache
def tell_of_slow_bfloat16(device: torch.device, dtype: torch.dtype) -> None:
    """Say, once in a process, that uncompiled a model of this type takes long to read prompts."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not multiplies_bfloat16():
        logger.warning(
            "this processor has no instructions for bfloat16, so prompts are read many times more "
            "slowly than in float32: compile (--compile), which has kernels for it, or use float32 "
            "(--dtype float32)"
        )
