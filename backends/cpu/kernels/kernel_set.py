"""The sets of kernels, each for some instructions, and the one that this process runs.

`DRAFTHEAD_KERNELS` names it; else it is the first that this processor can run. So a processor can
also build, test and time the sets of older ones.
"""

import os
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from drafthead.core.errors import UserError

VARIABLE, NONE = "DRAFTHEAD_KERNELS", "none"
AMX, AVX512, AVX2 = "amx", "avx512", "avx2"  # also the folders of `source/`


class KernelSet(NamedTuple):
    """The parts of a set of kernels."""

    folders: Sequence[str]  # a file is taken from the first that has it
    instructions: Sequence[str]  # beside those of AVX2, by torch's names

    @property
    def flags(self) -> list[str]:
        """The compiler's flags for these instructions."""
        return [f"-m{name.replace('amx_', 'amx-').replace('_', '')}" for name in self.instructions]

    @property
    def has_vnni(self) -> bool:
        """Whether one instruction multiplies whole numbers of eight bits and adds them up."""
        return any("vnni" in name for name in self.instructions)

    @property
    def missing(self) -> list[str]:
        """The instructions that this processor lacks."""
        has = torch.cpu.get_capabilities()
        return [name for name in ("avx2", "fma3", *self.instructions) if not has.get(name, False)]


WIDE = "avx512_f", "avx512_dq", "avx512_vl", "avx512_bw"
BYTES = *WIDE, "avx512_vnni"
HALVES = *BYTES, "avx512_bf16"
# The fastest first.
SETS = {
    AMX: KernelSet((AMX, AVX512), (*HALVES, "amx_tile", "amx_bf16", "amx_int8")),
    "avx512bf16": KernelSet((AVX512,), HALVES),
    "avx512vnni": KernelSet((AVX512,), BYTES),
    AVX512: KernelSet((AVX512,), WIDE),
    "avxvnni": KernelSet((AVX2,), ("avx_vnni",)),
    AVX2: KernelSet((AVX2,), ()),
}


@cache
def kernel_set() -> str | None:
    """The set that is named or, if none is, the first that can run; None where there is none.

    Raises UserError where the named one is unknown or cannot run here.
    """
    wanted = os.environ.get(VARIABLE, "")
    if not wanted or wanted == NONE:
        return next(iter(runnable()), None) if not wanted else None
    if wanted not in SETS:
        raise UserError(f"{VARIABLE}={wanted} is none of {', '.join(SETS)} and {NONE}")
    if wanted not in runnable():
        lacks = ", ".join(SETS[wanted].missing) or "the system's leave to use tiles"
        runs = ", ".join([*runnable(), NONE])
        raise UserError(f"{VARIABLE}={wanted} needs what this machine lacks ({lacks}): use {runs}")
    return wanted


def runnable() -> list[str]:
    """The sets that this processor and its system can run."""
    found = [name for name, each in SETS.items() if not each.missing]
    # torch asks the system, which may refuse.
    return [name for name in found if name != AMX or torch.cpu._init_amx()]
