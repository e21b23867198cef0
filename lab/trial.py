"""A trial of a training run: a few real steps, their speed and memory, and what follows from them.

It is made in a process of its own, set up as training does it, in a temporary folder.
"""

import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from drafthead.core.errors import UserError
from drafthead.lab.learning_curve import in_words
from drafthead.train.learning.engines import build_accelerator
from drafthead.train.run.config import Duration, RunConfig, load_run_config
from drafthead.train.train_heads import build_trainer

MOST_STEPS, MOST_SECONDS = 6, 45
OUT_OF_MEMORY = "OutOfMemoryError", "can't allocate memory"  # in torch's words, the second on CPUs


@dataclass(frozen=True)
class Trial:
    """The steps of a trial. The first one sets much up: it counts for the memory alone."""

    steps: int
    rows: int  # of a step
    tokens: int  # supervised, of the timed steps
    seconds: float  # of the timed steps
    target_seconds: float  # of them, for the target's features
    peak: int  # the most bytes that the process has had on its device
    memory: int  # bytes that the device has
    rows_there: int  # to train on
    tokens_there: int  # supervised, in these rows

    @property
    def tokens_per_s(self) -> float:
        """Supervised tokens a second."""
        return self.tokens / self.seconds

    @property
    def tokens_per_s_kept(self) -> float:
        """Supervised tokens a second where all features are read from a folder in no time."""
        return self.tokens / (self.seconds - self.target_seconds)

    def sentences(self, config: RunConfig) -> Iterator[str]:
        """The measurements, and how long the run of the configuration takes by them."""
        speed = self.tokens_per_s
        yield (
            f"{speed:,.0f} supervised tokens/s in {self.steps} steps of {self.rows} rows, "
            f"{self.target_seconds / self.seconds:.0%} of the time for the target"
        )
        if config.data.feature_folder is not None:
            speed = self.tokens_per_s_kept
            yield f"{speed:,.0f} supervised tokens/s once the target's features are kept"
        yield f"{self.peak / 1e9:.2f} GB of memory at the peak, of {self.memory / 1e9:.2f} GB"
        duration = Duration.of(config.train, self.rows_there)
        if duration.unit == "s":
            tokens, seconds = duration.limit * speed, duration.limit
        else:
            rows = duration.limit * config.train.batch_rows
            tokens = rows * self.tokens_there / self.rows_there
            seconds = tokens / speed
        yield (
            f"the configuration reads {tokens:,.0f} supervised tokens in {in_words(seconds)}, "
            f"{tokens / self.tokens_there:.1f} times the data; evaluating and saving come on top"
        )


class TrialOutOfMemoryError(UserError):
    """The memory did not suffice for a trial."""


def run_trial(config: Path, settings: Sequence[str], most: float = MOST_SECONDS) -> Trial:
    """Try the run of a configuration, in a process of its own, for so many seconds at most.

    Raises UserError with the process's own words when it failed, TrialOutOfMemoryError where the
    device had no more memory or the system ended the process.
    """
    given = f"{most:.0f}", str(config), *settings
    command = [sys.executable, "-m", "drafthead.lab.trial", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        ended = f"its process ended with status {done.returncode}"
        printed = done.stderr.strip().splitlines() or [ended]
        is_said = any(words in printed[-1] for words in OUT_OF_MEMORY)
        is_memory = is_said or done.returncode == -signal.SIGKILL
        kind = TrialOutOfMemoryError if is_memory else UserError
        remedy = "; lower train.micro_batch_rows or data.max_length" if is_memory else ""
        raise kind(f"the trial failed: {printed[-1]}{remedy}")
    return Trial(**json.loads(done.stdout.splitlines()[-1]))


def as_trial(config: RunConfig, folder: str) -> RunConfig:
    """The configuration with a few micro-batches to a step, and nothing kept."""
    train = config.train.shared_among(1)
    rows = min(2, train.accumulation(1)) * train.micro_batch_rows
    return replace(
        config,
        data=replace(config.data, feature_folder=None, feature_budget_gb=None),
        train=replace(train, output=folder, batch_rows=rows, overwrite=True),
    )


def tried(config: RunConfig, most: float = MOST_SECONDS) -> Trial:
    """Set up a run and do its first steps, at least one, for so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        config = as_trial(config, folder)
        accelerator = build_accelerator(config)
        trainer = build_trainer(accelerator, config, config.folder())
        data = trainer.task.train
        steps: list[tuple[float, float, float]] = []  # tokens, seconds, seconds of the target
        began = time.perf_counter()
        while not steps or (len(steps) < MOST_STEPS and time.perf_counter() - began < most):
            rows = trainer.order.rows_of_step(len(steps))
            started = time.perf_counter()
            _, in_target = trainer.runner.run(len(steps), 0.5, rows)
            seconds = time.perf_counter() - started
            steps.append((data.supervised_in(rows), seconds, in_target))
        tokens, seconds, of_target = map(sum, zip(*(steps[1:] or steps), strict=True))
        return Trial(
            len(steps), len(rows), int(tokens), seconds, of_target,
            *peak_and_memory(accelerator.device), len(data.rows), data.supervised_tokens,
        )  # fmt: skip


def peak_and_memory(device: torch.device) -> tuple[int, int]:
    """The most bytes that this process has had on the device, and all that the device has."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_allocated(device), total
    unit = 1 if sys.platform == "darwin" else 1024
    peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak, psutil.virtual_memory().total


if __name__ == "__main__":
    try:
        seconds, file, *changes = sys.argv[1:]
        print(json.dumps(vars(tried(load_run_config(Path(file), changes), float(seconds)))))
    except UserError as error:
        sys.exit(str(error))
