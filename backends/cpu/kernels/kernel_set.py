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
    found = torch.cpu.get_capabilities()
    if all(found.get(name, False) for name in ("avx512_bf16", "avx512_vl", "avx512_dq")):
        return AVX512
    return AVX2 if found.get("avx2", False) and found.get("fma3", False) else None
