"""A trial of a training run, in this process: a few real steps, and a line of JSON about them.

The run is set up as training does it, in a temporary folder.
"""

import json
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from drafthead.core.errors import UserError
from drafthead.lab.planned_training import MOST_STEPS, Trial
from drafthead.train.learning.engines import build_accelerator
from drafthead.train.run.config import RunConfig, load_run_config
from drafthead.train.train_heads import build_trainer

MOST_SECONDS = 45


def as_trial(config: RunConfig, folder: str) -> RunConfig:
    """The configuration with a few micro-batches to a step, and nothing kept."""
    train = config.train.shared_among(1)
    rows = min(2, train.accumulation(1)) * train.micro_batch_rows
    return replace(
        config,
        data=replace(config.data, feature_folder=None, feature_dtype=None, feature_budget_gb=None),
        train=replace(train, output=folder, batch_rows=rows, overwrite=True),
    )


def tried(config: RunConfig) -> Trial:
    """Set up a run and do its first steps, for a limited time."""
    with tempfile.TemporaryDirectory() as folder:
        config = as_trial(config, folder)
        accelerator = build_accelerator(config)
        trainer = build_trainer(accelerator, config, config.folder())
        steps: list[tuple[float, float, float]] = []  # tokens, seconds, seconds of the target
        began = time.perf_counter()
        while len(steps) < MOST_STEPS and time.perf_counter() - began < MOST_SECONDS:
            rows = trainer.order.rows_of_step(len(steps))
            started = time.perf_counter()
            sums = trainer.runner.run(len(steps), 0.5, rows)
            seconds = time.perf_counter() - started
            steps.append((trainer.task.train.supervised_in(rows), seconds, sums.target_seconds))
        tokens, seconds, of_target = map(sum, zip(*(steps[1:] or steps), strict=True))
        peak = peak_bytes(accelerator.device)
        return Trial(len(steps), len(rows), int(tokens), seconds, of_target, peak)


def peak_bytes(device: torch.device) -> int:
    """The most bytes on the device; on a CPU, that this process has had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    try:
        print(json.dumps(vars(tried(load_run_config(Path(sys.argv[1]), sys.argv[2:])))))
    except UserError as error:
        sys.exit(str(error))
