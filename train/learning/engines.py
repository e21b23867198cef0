"""The engine that shares a run among processes: what the launcher asked for, or an error."""

import ctypes
import logging
import os
import time

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from drafthead.core.errors import UserError
from drafthead.train.run.config import RunConfig

logger = logging.getLogger(__name__)

# What the launcher sets for each engine.
ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED,
    "ACCELERATE_USE_FSDP": DistributedType.FSDP,
}


def build_accelerator(config: RunConfig) -> Accelerator:
    """accelerate as the launcher set it up; UserError for settings that cannot be combined."""
    engine = engine_asked_for()
    if engine is not None and config.optimizer.name == "muon":  # the engine shares the optimiser
        raise UserError("Muon needs whole matrices: use optimizer.name=adamw with FSDP or ZeRO")
    accelerator = _new_accelerator(config, engine)
    check_engine(engine, accelerator.distributed_type)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise UserError(
            f"{launched} processes were launched, accelerate joined {accelerator.num_processes}: "
            "launch with one of the files in configs/accelerate/"
        )
    shared = config.train.shared_among(accelerator.num_processes)
    if engine is DistributedType.DEEPSPEED:
        settings = accelerator.deepspeed_plugin.deepspeed_config
        settings["train_micro_batch_size_per_gpu"] = shared.micro_batch_rows
        settings["gradient_clipping"] = config.optimizer.max_grad_norm
        # Else transformers would build the frozen target in pieces, as under ZeRO-3 a model that is
        # trained, and no engine would ever put them together.
        unset_hf_deepspeed_config()
    return accelerator


def engine_asked_for() -> DistributedType | None:
    """The engine that the launcher's environment names; None for DDP or a single process."""
    for variable, engine in ENGINES.items():
        if os.environ.get(variable, "").lower() == "true":
            return engine
    return None


def _new_accelerator(config: RunConfig, engine: DistributedType | None) -> Accelerator:
    output, has_device = config.train.output, torch.accelerator.is_available()
    # Without `cpu`, processes on a machine without a GPU would not find each other; with it,
    # accelerate takes no engine. DeepSpeed needs to be told the CPU's way of communicating instead.
    on_cpu = config.train.cpu or not has_device
    deepspeed_on_cpu = engine is DistributedType.DEEPSPEED and not has_device
    if deepspeed_on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        return Accelerator(
            cpu=on_cpu and not deepspeed_on_cpu,
            mixed_precision=config.train.mixed_precision,
            log_with="tensorboard",
            project_config=ProjectConfiguration(output, logging_dir=f"{output}/tensorboard"),
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if deepspeed_on_cpu else None,
        )
    except ImportError as error:
        if engine is not DistributedType.DEEPSPEED:
            raise
        raise UserError(
            "the launcher asked for DeepSpeed, which is not installed: pip install "
            "'drafthead[deepspeed]', or launch with configs/accelerate/ddp.yaml"
        ) from error


def check_engine(asked: DistributedType | None, taken: DistributedType) -> None:
    """Raise UserError if accelerate took another engine than the launcher asked for."""
    if asked is not None and asked != taken:
        raise UserError(
            f"the launcher asked for {asked.value}, and accelerate took {taken.value}: FSDP needs "
            "GPUs, and train.cpu=true excludes both; launch with configs/accelerate/cpu2.yaml, or "
            "with ddp.yaml where there are GPUs"
        )


FEW_KERNELS = "64"
# What was given back has to be asked for again, which takes up to a tenth of a step.
STEPS_BETWEEN = 8
CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"  # read once, at the first product
# glibc's mallopt: blocks up to this size are kept when they are freed. Else the system takes back
# each large one and clears it before the next use, which takes a tenth of a step.
MMAP_THRESHOLD, TRIM_THRESHOLD, LARGEST_KEPT = -3, -1, 2**31 - 1


class HostMemory:
    """Keeps freed memory for the next steps, and gives it back every few of them, on a CPU.

    Micro-batches have many shapes. The allocator keeps what it was given back in pieces of all
    sizes, and oneDNN keeps a compiled kernel for each shape, up to 1,024 of them: the memory of a
    process that trains on a CPU would grow for some hundred steps.
    """

    def __init__(self, device: torch.device):
        """Before anything is computed: a capacity that the user has set stays as it is."""
        self.trim = None
        if device.type == "cpu":
            os.environ.setdefault(CAPACITY, FEW_KERNELS)
            # In glibc; other C libraries hold less, or have no such function.
            libc = ctypes.CDLL(None)
            self.trim = getattr(libc, "malloc_trim", None)
            if self.trim is not None:
                libc.mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
                libc.mallopt(TRIM_THRESHOLD, LARGEST_KEPT)

    def after_step(self, step: int) -> None:
        """Give free memory back to the system, if that is due."""
        if self.trim is not None and step % STEPS_BETWEEN == 0:
            self.trim(0)


SIZE, REPEATS = 1024, 3
WORTH_SAYING = 1.3


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
