"""Whether a processor is faster in bfloat16: `train.mixed_precision=auto` asks, and a warning."""

import logging
import time
from typing import Literal

import torch

from drafthead.heads.target.processor import bfloat16_instructions

logger = logging.getLogger(__name__)

SIZE, REPEATS = 1024, 3
WORTH_SAYING = 1.3


def precision_here(cpu: bool) -> Literal["no", "bf16"]:
    """`bf16` on GPUs and on processors with instructions for it, else `no`; `cpu`: uses no GPU.

    Not by measuring: that could differ between the processes of a run, or from the run that it
    continues.
    """
    on_gpu = torch.accelerator.is_available() and not cpu
    return "bf16" if on_gpu or bfloat16_instructions() else "no"


def product_seconds(dtype: torch.dtype) -> float:
    """The time of a product of two [SIZE, SIZE] matrices on the CPU, the best of `REPEATS`."""
    a, b = torch.ones(2, SIZE, SIZE, dtype=dtype)
    times = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def warn_of_slow_bfloat16(device: torch.device, mixed_precision: str) -> None:
    """Say so when training in bfloat16 takes longer than it would in float32.

    Processors with AVX512-BF16 and without AMX may need twice the time.
    """
    if device.type != "cpu" or mixed_precision != "bf16":
        return
    ratio = product_seconds(torch.bfloat16) / product_seconds(torch.float32)
    if ratio > WORTH_SAYING:
        logger.warning(
            "this processor multiplies matrices %.1f times faster in float32 than in bfloat16: "
            "train.mixed_precision=no is faster here, and takes more memory",
            ratio,
        )
