"""What a training run will need: its memory, disk and time, before they are spent."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from drafthead.core.errors import UserError
from drafthead.lab.planning.estimate import (
    BUFFERS,
    DiskUse,
    Setup,
    disk_use,
    held_memory,
    less_memory,
    set_up,
)
from drafthead.train.run.config import RunConfig, load_run_config

MOST_STEPS = 6  # of a trial
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
UNITS |= {f"{unit}I": 1024.0**power for power, unit in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Trial:
    """The steps of a trial. The first one sets much up: it counts for the memory alone."""

    steps: int
    rows: int  # of a step
    tokens: int  # supervised, of the timed steps
    seconds: float  # of the timed steps
    target_seconds: float  # of them, for the target's features
    peak: int  # the most bytes that the process has had

    @property
    def tokens_per_s(self) -> float:
        """Supervised tokens a second."""
        return self.tokens / self.seconds

    @property
    def tokens_per_s_kept(self) -> float:
        """Supervised tokens a second where all features are read from a folder in no time."""
        return self.tokens / (self.seconds - self.target_seconds)


@dataclass(frozen=True)
class TrainingPlan:
    """All that is known of a run before it."""

    config: RunConfig
    setup: Setup
    processes: int
    on_cpu: bool
    held: dict[str, int]  # bytes of one process throughout a step, by part
    disk: DiskUse
    trial: Trial | None
    untried: str  # why there was no trial
    room: int  # bytes that a device has, or the machine
    tokens: float | None  # supervised tokens that are wanted

    @property
    def computed(self) -> int:
        """The bytes that one process holds throughout, without what passes within a step."""
        return sum(self.held.values())

    @property
    def needed(self) -> int:
        """The bytes of a process, measured if the run was tried, or the least that they can be.

        On a CPU, of all processes.
        """
        exchanged = self.held.get(BUFFERS, 0)
        one = self.computed if self.trial is None else self.trial.peak + exchanged
        return one * self.processes if self.on_cpu else one

    @property
    def fits(self) -> bool:
        """Tell whether the memory suffices."""
        return self.needed <= self.room

    def verdict(self) -> str:
        """One sentence: whether it fits, and if not, what to change."""
        about = "at least" if self.trial is None else "about"
        need = (
            f"the run needs {about} {self.needed / 1e9:.2f} GB of memory, and there are "
            f"{self.room / 1e9:.2f} GB"
        )
        if not self.fits:
            settings = ", ".join(less_memory(self.setup))
            return f"it does not fit: {need}; what needs less: {settings or 'a smaller target'}"
        return f"it fits: {need}" if self.trial else f"it may fit: {need}; real steps would tell"


def plan_training(
    config: Path,
    settings: list[str],
    processes: int,
    memory: str | None,  # of a device, as 80GB; None: what is here
    tokens: float | None,  # supervised ones that are wanted
    measure: bool,
    has_data: bool = True,  # else all rows are taken to be full
) -> TrainingPlan:
    """The memory, the disk and the time that a training run will need.

    What a process holds throughout is computed from the sizes of weights: of the target only
    config.json is read, and the tokenizer. Then a few real steps are tried in another process, if
    the weights are there and the memory suffices: they show the speed, and the memory as it is.
    """
    run = load_run_config(config, settings)
    run = replace(run, train=run.train.shared_among(processes))
    if tokens is not None and tokens <= 0:
        raise UserError(f"--tokens must be above 0, got {tokens:g}")
    on_cpu = run.train.cpu or not torch.cuda.is_available()
    room = memory_here(on_cpu) if memory is None else bytes_of(memory)
    # This process has imported what one that trains imports, and done nothing yet.
    libraries = psutil.Process().memory_info().rss if on_cpu else 0
    setup = set_up(run, has_data)
    held, disk = held_memory(setup, processes, libraries), disk_use(setup)
    plan = TrainingPlan(
        run, setup, processes, on_cpu, held, disk, None, "--no-measure", room, tokens
    )
    if measure:
        trial, reason = tried(config, settings, plan.computed, memory_here(on_cpu))
        plan = replace(plan, trial=trial, untried=reason)
    return plan


def tried(
    config: Path, settings: list[str], needed: int, available: int
) -> tuple[Trial | None, str]:
    """A trial of the run, or None and why there is none."""
    if needed > available:
        return None, f"it needs at least {needed / 1e9:.1f} GB, and {available / 1e9:.1f} are here"
    print(f"trying up to {MOST_STEPS} real steps", flush=True)
    try:
        return run_trial(config, settings), ""
    except UserError as error:
        return None, str(error)


class TrialOutOfMemoryError(UserError):
    """The memory did not suffice for a trial."""


def run_trial(config: Path, settings: Sequence[str]) -> Trial:
    """Try the run of a configuration, in a process of its own.

    Raises UserError with the process's own words when it failed, TrialOutOfMemoryError where the
    device had no more memory or the system ended the process.
    """
    command = [sys.executable, "-m", "drafthead.lab.planning.trial", str(config), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        ended = f"its process ended with status {done.returncode}"
        printed = done.stderr.strip().splitlines() or [ended]
        is_memory = "OutOfMemoryError" in printed[-1] or done.returncode == -signal.SIGKILL
        kind = TrialOutOfMemoryError if is_memory else UserError
        raise kind(f"the trial failed: {printed[-1].removeprefix('drafthead: ')}")
    return Trial(**json.loads(done.stdout.splitlines()[-1]))


def memory_here(on_cpu: bool) -> int:
    """The bytes that the GPU has, or this machine."""
    if on_cpu:
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(0).total_memory)


def bytes_of(text: str) -> int:
    """The bytes that a text such as 80GB or 64GiB means; UserError for any other."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise UserError(f"--memory must be a size such as 80GB or 64GiB, got {text!r}")
    return round(float(match[1]) * UNITS[match[2]])
