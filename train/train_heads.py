"""Entry point of training: `accelerate launch train/train_heads.py --config FILE`."""

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm.contrib.logging import logging_redirect_tqdm

from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.train.data.training_rows import Sources, check_writers, training_data
from drafthead.train.features.kept import kept_features
from drafthead.train.features.reading import load_target
from drafthead.train.jobs.console import quiet_libraries, run_launched
from drafthead.train.jobs.outputs import full_disk_named, only_writer
from drafthead.train.learning.engines import (
    HostMemory,
    build_accelerator,
    warn_of_slow_bfloat16,
)
from drafthead.train.learning.loop import Trainer
from drafthead.train.learning.step import TrainingTask
from drafthead.train.run.config import RunConfig, load_run_config
from drafthead.train.run.folder import RunFolder
from drafthead.train.run.trainables import new_head

logger = logging.getLogger("drafthead.train")  # the module is `__main__` where it is launched


def train(config: RunConfig) -> bool:
    """Train a head as configured; False when it was stopped and can be continued."""
    accelerator = build_accelerator(config)
    folder = config.folder()
    path, is_main = folder.path, accelerator.is_main_process
    lock = only_writer(path) if is_main else nullcontext()
    with full_disk_named(path), lock, logging_redirect_tqdm():
        if folder.status(config.train.overwrite) == "finished":
            logger.info("%s holds this run, finished: nothing to do", path)
            return True
        finished = build_trainer(accelerator, config, folder).fit()
    accelerator.end_training()
    return finished


def build_trainer(accelerator: Accelerator, config: RunConfig, folder: RunFolder) -> Trainer:
    """Load the target, read the rows, make the head."""
    data, settings, device = config.data, config.train, accelerator.device
    memory = HostMemory(device)
    set_seed(settings.seed)
    precision = settings.mixed_precision
    if accelerator.is_main_process:
        warn_of_slow_bfloat16(device, precision)
    processes = accelerator.num_processes
    target = load_target(config.target, precision, data.max_length, device, processes)
    assert target.tokenizer is not None  # a target read from disk has one
    rows, held_out = training_data(data, target.tokenizer, settings.seed, target.vocab_size)
    sources = Sources(rows.fingerprint(), weights_fingerprint(target))
    writers = rows.sequences.writers
    check_writers(", ".join(data.sources), writers, config.target.name, sources.target)
    counts = rows.sequences.token_counts(target.vocab_size)
    head = new_head(config.family, config.head, target, counts, settings.init_from)
    kept = kept_features(data, precision, head, target, rows, sources)
    task = TrainingTask(target, config.target.name, head, sources, rows, held_out, kept)
    return Trainer(accelerator, task, settings, config.optimizer, folder, memory)


def main(
    config: Annotated[
        Path, typer.Option(help="Configuration file, such as configs/demo_medusa.yaml.")
    ],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Train draft heads in each of the processes launched, as `drafthead train` does in one."""
    run(load_run_config(config, settings or [], present=True))


def run(config: RunConfig) -> None:
    """Train as configured; a run that was stopped ends with a sentence and exit status 130."""
    quiet_libraries()
    if not train(config):
        print("stopped; the state is saved, the same command continues", file=sys.stderr)
        raise typer.Exit(130)


if __name__ == "__main__":
    run_launched(main)
