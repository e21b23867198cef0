"""The sets of kernels: for processors with AVX512-BF16, and for others with AVX2."""

from functools import cache

import torch
from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512, VecAVX512VNNI, pick_vec_isa

AVX512, AVX2 = "avx512", "avx2"


@cache
def kernel_set() -> str | None:
    """The folder of `source/` with what is written for this processor.

    None where torch generates no code for x86, and where torch itself has something better (AMX).
    Processors with AVX512 that cannot multiply bfloat16 numbers get the kernels for AVX2: these
    convert each weight to float32, which takes no longer than fetching it.
    """
    found = type(pick_vec_isa())
    if found is VecAVX512VNNI and torch.cpu.get_capabilities().get("avx512_bf16", False):
        return AVX512
    return AVX2 if found in (VecAVX2, VecAVX512, VecAVX512VNNI) else None
