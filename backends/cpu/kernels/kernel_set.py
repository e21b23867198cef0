"""The sets of kernels: for AMX tiles, for other processors with AVX512-BF16, and for AVX2."""

import os
from functools import cache

import torch

AMX, AVX512, AVX2 = "amx", "avx512", "avx2"
# Folders of `source/` that a set is made of: a file is taken from the first that has it.
FOLDERS = {AMX: (AMX, AVX512), AVX512: (AVX512,), AVX2: (AVX2,)}


@cache
def kernel_set() -> str | None:
    """The set that is written for this processor; None where there is none.

    Processors with AVX512 that cannot multiply bfloat16 numbers get the kernels for AVX2: these
    convert each weight to float32, which takes no longer than fetching it.
    """
    widest = torch.backends.cpu.get_cpu_capability()  # that torch may use: ATEN_CPU_CAPABILITY
    if widest == "AVX512" and torch.cpu.get_capabilities().get("avx512_bf16", False):
        return AMX if may_use_tiles() else AVX512
    return AVX2 if widest in ("AVX2", "AVX512") else None


def may_use_tiles() -> bool:
    """Whether the system lets this process use AMX tiles, and the user names nothing less."""
    wanted = os.environ.get("ATEN_CPU_CAPABILITY", "").lower() != AVX512
    has = torch.cpu.get_capabilities().get("amx_bf16", False)
    return wanted and has and torch.cpu._init_amx()  # asks the system, which may refuse
