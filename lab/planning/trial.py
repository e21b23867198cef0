"""A few real steps in a process of their own: how fast they are, and how much memory they take.

The process sets the run up as training does, in a temporary folder, and prints a line of JSON for
each step.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from drafthead.heads.errors import UserError
from drafthead.train.learning.engines import build_accelerator
from drafthead.train.run.config import RunConfig, load_run_config
from drafthead.train.train_heads import build_trainer

MOST_STEPS, MOST_SECONDS = 6, 45


@dataclass(frozen=True)
class TrialStep:
    """A step of a trial, and the most memory that its process has had until then."""

    rows: int
    tokens: int  # supervised
    seconds: float
    target_share: float  # of the seconds, for the target's features
    peak: int  # bytes


@dataclass(frozen=True)
class Trial:
    """The steps of a trial. The first one sets much up and does not count for the speed."""

    steps: tuple[TrialStep, ...]

    @property
    def peak(self) -> int:
        """The most bytes that the process has had."""
        return self.steps[-1].peak

    @property
    def tokens_per_s(self) -> float:
        """Supervised tokens a second."""
        return sum(s.tokens for s in self._timed) / sum(s.seconds for s in self._timed)

    @property
    def tokens_per_s_kept(self) -> float:
        """Supervised tokens a second where all features are read from a folder in no time."""
        seconds = sum(s.seconds * (1 - s.target_share) for s in self._timed)
        return sum(s.tokens for s in self._timed) / seconds

    @property
    def _timed(self) -> tuple[TrialStep, ...]:
        return self.steps[1:] or self.steps


def run_trial(config: Path, settings: Sequence[str], shown: Callable[[TrialStep], None]) -> Trial:
    """Try the run of a configuration, in a process of its own; `shown` gets each step.

    Raises UserError with the process's own words when it failed.
    """
    command = [sys.executable, "-m", "drafthead.lab.planning.trial", str(config), *settings]
    steps = []
    with (
        tempfile.TemporaryFile("w+") as words,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                steps.append(TrialStep(**json.loads(line)))
                shown(steps[-1])
        finally:
            if process.poll() is None:
                process.terminate()
        if process.wait() != 0 or not steps:
            words.seek(0)
            printed = words.read().strip().splitlines() or ["it printed nothing"]
            raise UserError(f"the trial failed: {printed[-1].removeprefix('drafthead: ')}")
    return Trial(tuple(steps))


def as_trial(config: RunConfig, folder: str) -> RunConfig:
    """The configuration with a few micro-batches to a step, and nothing kept."""
    train = config.train
    rows = min(2, train.accumulation(1)) * train.micro_batch_rows
    return replace(
        config,
        data=replace(config.data, feature_folder=None, feature_dtype=None, feature_budget_gb=None),
        train=replace(train, output=folder, batch_rows=rows, overwrite=True),
    )


def trial_steps(config: RunConfig) -> Iterator[TrialStep]:
    """Set up a run and do its first steps, for a limited time."""
    with tempfile.TemporaryDirectory() as folder:
        config = as_trial(config, folder)
        accelerator = build_accelerator(config)
        trainer = build_trainer(accelerator, config, config.folder())
        began = time.perf_counter()
        for step in range(MOST_STEPS):
            rows = trainer.order.rows_of_step(step)
            started = time.perf_counter()
            sums = trainer.runner.run(step, 0.5, rows)
            ended = time.perf_counter()
            yield TrialStep(
                rows=len(rows),
                tokens=trainer.task.train.supervised_in(rows),
                seconds=ended - started,
                target_share=sums.target_seconds / (ended - started),
                peak=peak_bytes(accelerator.device),
            )
            if ended - began > MOST_SECONDS:
                break


def peak_bytes(device: torch.device) -> int:
    """The most bytes on the device; on a CPU, that this process has had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    try:
        for done in trial_steps(load_run_config(Path(sys.argv[1]), sys.argv[2:])):
            print(json.dumps(vars(done)), flush=True)
    except UserError as error:
        sys.exit(str(error))
