"""What a training run will need: its memory, disk and time, before they are spent."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from drafthead.core.errors import UserError
from drafthead.lab.planning.dry_setup import DrySetup, dry_setup
from drafthead.lab.planning.estimate import (
    DiskUse,
    Place,
    Remedy,
    StepMemory,
    disk_use,
    process_memory,
    remedies,
    step_memory,
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
    setup: DrySetup
    place: Place
    memory: StepMemory
    disk: DiskUse
    trial: Trial | None
    untried: str  # why there was no trial
    room: int  # bytes that a device has, or the machine
    tokens: float | None  # supervised tokens that are wanted
    remedies: Sequence[Remedy] = ()

    @property
    def computed(self) -> int:
        """The bytes of one process by the step without numbers."""
        return process_memory(self.memory, self.place).total()

    @property
    def needed(self) -> int:
        """The bytes of a process, measured if one like it was tried; on a CPU, of all of them."""
        alone = self.trial is not None and self.place.processes == 1
        one = self.trial.peak if self.trial is not None and alone else self.computed
        return one * self.place.processes if self.place.on_cpu else one

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.needed <= self.room

    def verdict(self) -> str:
        """One sentence: whether it fits, and if not, what to change first."""
        need = f"{self.needed / 1e9:.2f} GB of memory, and there are {self.room / 1e9:.2f} GB"
        if self.fits:
            return f"it fits: the run needs about {need}"
        processes = self.place.processes if self.place.on_cpu else 1
        advice = "no single setting above suffices"
        for remedy in self.remedies:
            if self.needed - processes * (self.computed - remedy.total) <= self.room:
                advice = f"with {remedy.setting} it would fit"
                break
        return f"it does not fit: the run needs about {need}; {advice}"


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

    The memory is computed from a step without numbers, part by part: of the target only config.json
    is read, and the tokenizer. Then a few real steps are tried in another process, if the weights
    are there and the memory suffices: they show the speed, and the memory as it is. If the run does
    not fit, settings that would help are listed, those that cost least first.
    """
    run = load_run_config(config, settings)
    run = replace(run, train=run.train.shared_among(processes))
    if tokens is not None and tokens <= 0:
        raise UserError(f"--tokens must be above 0, got {tokens:g}")
    on_cpu = run.train.cpu or not torch.cuda.is_available()
    room = memory_here(on_cpu) if memory is None else bytes_of(memory)
    # This process has imported what one that trains imports, and done nothing yet.
    place = Place(processes, on_cpu, psutil.Process().memory_info().rss if on_cpu else 0)
    setup = dry_setup(run, has_data=has_data)
    step = step_memory(setup, processes)
    plan = TrainingPlan(
        run, setup, place, step, disk_use(setup, step), None, "--no-measure", room, tokens
    )
    if measure:
        trial, reason = tried(config, settings, plan.computed, memory_here(on_cpu))
        plan = replace(plan, trial=trial, untried=reason)
    if not plan.fits:
        plan = replace(plan, remedies=remedies(setup, place))
    return plan


def tried(
    config: Path, settings: list[str], needed: int, available: int
) -> tuple[Trial | None, str]:
    """A trial of the run, or None and why there is none."""
    if needed > available:
        return None, f"it needs {needed / 1e9:.1f} GB, and {available / 1e9:.1f} are here"
    print(f"trying up to {MOST_STEPS} real steps", flush=True)
    try:
        return run_trial(config, settings), ""
    except UserError as error:
        return None, str(error)


def run_trial(config: Path, settings: Sequence[str]) -> Trial:
    """Try the run of a configuration, in a process of its own.

    Raises UserError with the process's own words when it failed.
    """
    command = [sys.executable, "-m", "drafthead.lab.planning.trial", str(config), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        printed = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise UserError(f"the trial failed: {printed[-1].removeprefix('drafthead: ')}")
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
