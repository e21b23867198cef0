"""The sets of kernels: for processors with AVX512-BF16, and for others with AVX2."""

from functools import cache

import torch

AVX512, AVX2 = "avx512", "avx2"


@cache
def kernel_set() -> str | None:
    """The folder of `source/` with what is written for this processor; None where there is none.

    Processors with AVX512 that cannot multiply bfloat16 numbers get the kernels for AVX2: these
    convert each weight to float32, which takes no longer than fetching it.
    """
    widest = torch.backends.cpu.get_cpu_capability()  # that torch may use: ATEN_CPU_CAPABILITY
    if widest == "AVX512" and torch.cpu.get_capabilities().get("avx512_bf16", False):
        return AVX512
    return AVX2 if widest in ("AVX2", "AVX512") else None
