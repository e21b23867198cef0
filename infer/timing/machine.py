"""The machine and versions of a measurement: without these, numbers cannot be compared."""

import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from drafthead.core.target.processor import instructions


def processor_name() -> str:
    """The GPU's name if there is one, else the CPU's and its instructions.

    One name may stand for several generations: an "AMD EPYC" may multiply bfloat16 numbers or not.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if model:
            return f"{model.group(1).strip()} ({instructions()})"
    return f"{platform.processor() or platform.machine()} ({instructions()})"


def describe_machine() -> dict[str, str | int]:
    """Processor, threads, memory and operating system."""
    return {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
    }


def free_memory(device: torch.device) -> int:
    """The bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def describe_versions() -> dict[str, str]:
    """Versions of the packages that the speed depends on."""
    names = ("drafthead", "torch", "transformers", "accelerate")
    return {"python": sys.version.split()[0], **{name: version_of(name) for name in names}}


def version_of(name: str) -> str:
    """A package's version; for a checkout that runs without an installation, that."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
