"""What a run is built of before it starts: accelerate and a fresh head."""

import os
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import ProjectConfiguration

from drafthead.heads.base import DraftHead, head_family
from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target
from drafthead.train.run_config import RunConfig


def build_accelerator(config: RunConfig) -> Accelerator:
    """accelerate as the launcher set it up; raises UserError for what it cannot combine."""
    output = config.train.output
    accelerator = Accelerator(
        # Without this, processes on a machine that has only a CPU would not find each other.
        cpu=config.train.cpu or not torch.accelerator.is_available(),
        mixed_precision=config.train.mixed_precision,
        log_with="tensorboard",
        project_config=ProjectConfiguration(output, logging_dir=f"{output}/tensorboard"),
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise UserError(
            f"{launched} processes were launched, accelerate joined {accelerator.num_processes}: "
            "launch with one of the files in configs/accelerate/"
        )
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if sharded and config.optimizer.name == "muon":
        raise UserError("Muon needs whole matrices: use optimizer.name=adamw with FSDP or ZeRO")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings = accelerator.deepspeed_plugin.deepspeed_config
        settings["train_micro_batch_size_per_gpu"] = config.train.micro_batch_rows
        settings["gradient_clipping"] = config.optimizer.max_grad_norm
    config.train.accumulation(accelerator.num_processes)
    return accelerator


def build_head(family: str, config: Any, target: Target, token_counts: torch.Tensor) -> DraftHead:
    """A fresh head of the target's sizes for data in which token v is supervised counts[v] times.

    Raises UserError when the head cannot have the sizes that were asked for.
    """
    cls = head_family(family)
    head = cls(cls.sized(config, target))
    head.prepare(token_counts)
    head.initialize(target)
    return head
