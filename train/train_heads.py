"""Entry point of training: `accelerate launch train/train_heads.py --config FILE`."""

import logging
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator, DistributedType
from accelerate.utils import ProjectConfiguration, set_seed
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers.utils.logging import disable_progress_bar

from drafthead.heads.base import DraftHead, head_family
from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target
from drafthead.train.features import load_target
from drafthead.train.full_disk import full_disk_named
from drafthead.train.loop import Trainer
from drafthead.train.packing import load_packed
from drafthead.train.run_config import RunConfig, load_run_config
from drafthead.train.run_folder import RunFolder
from drafthead.train.step import TrainingTask

logger = logging.getLogger(__name__)

SECONDS_FOR_MAIN = 15


def train(config: RunConfig) -> bool:
    """Train a head as configured; False when it was stopped and can be continued."""
    accelerator = build_accelerator(config)
    folder = config.folder()
    lock = folder.locked() if accelerator.is_main_process else nullcontext()
    with full_disk_named(folder.path), lock:
        if folder.status(config.train.overwrite) == "finished":
            logger.info("%s holds this run, finished: nothing to do", folder.path)
            return True
        with logging_redirect_tqdm():
            finished = build_trainer(accelerator, config, folder).fit()
    accelerator.end_training()
    return finished


def build_trainer(accelerator: Accelerator, config: RunConfig, folder: RunFolder) -> Trainer:
    """Load target and data, and make the head."""
    set_seed(config.train.seed)
    data, precision = config.data, config.train.mixed_precision
    target = load_target(config.target, precision, data.max_length, accelerator.device)
    tokenizer = target.tokenizer
    assert tokenizer is not None  # a target read from disk has one
    rows = load_packed(data.train, tokenizer, data, config.train.seed)
    head = new_head(config.family, config.head, target, rows.token_counts(target.vocab_size))
    held_out = None
    if data.validation is not None:
        held_out = load_packed(data.validation, tokenizer, data, 0, data.max_validation)
    task = TrainingTask(target, config.target.name, head, rows, held_out)
    return Trainer(accelerator, task, config.train, config.optimizer, folder)


def build_accelerator(config: RunConfig) -> Accelerator:
    """accelerate as the launcher set it up; UserError for settings that cannot be combined."""
    output = config.train.output
    accelerator = Accelerator(
        # Without this, processes on a machine without a GPU would not find each other.
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


def new_head(family: str, config: Any, target: Target, token_counts: torch.Tensor) -> DraftHead:
    """A fresh head of the target's sizes; token v is supervised token_counts[v] times, [V].

    Raises UserError when the head cannot have the configured sizes.
    """
    cls = head_family(family)
    head = cls(cls.sized(config, target))
    head.prepare(token_counts)
    head.initialize(target)
    return head


def main(
    config: Annotated[
        Path, typer.Option(help="Configuration file, such as configs/demo_medusa.yaml.")
    ],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Train draft heads on the hidden states of a frozen target.

    \b
    One process:        drafthead train --config configs/demo_medusa.yaml
    With accelerate:    accelerate launch train/train_heads.py --config FILE
    Two CPU processes:  accelerate launch --config_file configs/accelerate/cpu2.yaml
                        train/train_heads.py --config FILE
    Other settings:     ... --config FILE optimizer.lr=3e-4 train.max_minutes=10

    A file has the sections target, head, data, optimizer and train. Settings after it override it.
    The same command continues a stopped run, and does nothing when the run is finished.
    """
    is_main = int(os.environ.get("RANK", "0")) == 0
    logging.getLogger("drafthead").setLevel(logging.INFO if is_main else logging.ERROR)
    logging.getLogger("accelerate").setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # else one line per retry
    disable_progress_bar()
    if not train(load_run_config(config, settings or [])):
        print("stopped; the state is saved, the same command continues", file=sys.stderr)
        raise typer.Exit(130)


def fail(error: UserError) -> int:
    """Print one sentence and return the exit status."""
    # The launcher kills all processes once one has ended. The others wait, so that the main process
    # can print its error first, which mostly is the same.
    if int(os.environ.get("RANK", "0")) != 0:
        time.sleep(SECONDS_FOR_MAIN)
    print(f"drafthead: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(fail(error))
    except KeyboardInterrupt:
        sys.exit(130)
