"""What a training run will need: its memory, disk and time, before they are spent."""

import re
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from drafthead.heads.errors import UserError
from drafthead.lab.planning.dry_setup import dry_setup
from drafthead.lab.planning.estimate import Place, disk_use, remedies, step_memory
from drafthead.lab.planning.trial import MOST_STEPS, Trial, run_trial
from drafthead.lab.reports.training_plan import TrainingPlan
from drafthead.train.run.config import load_run_config

UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
UNITS |= {f"{unit}I": 1024.0**power for power, unit in enumerate("KMGT", 1)}


def plan_training(
    config: Path,
    settings: list[str],
    processes: int,
    memory: str | None,  # of a device, as 80GB; None: what is here
    tokens: float | None,  # supervised ones that are wanted
    measure: bool,
) -> TrainingPlan:
    """The memory, the disk and the time that a training run will need.

    The memory is computed from a step without numbers, part by part: of the target only config.json
    is read, and the tokenizer. Then a few real steps are tried in another process, if the weights
    are there and the memory suffices: they show the speed, and the memory as it is. If the run does
    not fit, settings that would help are listed, those that cost least first.
    """
    run = load_run_config(config, settings)
    run.train.accumulation(processes)
    if tokens is not None and tokens <= 0:
        raise UserError(f"--tokens must be above 0, got {tokens:g}")
    on_cpu = run.train.cpu or not torch.cuda.is_available()
    room = memory_here(on_cpu) if memory is None else bytes_of(memory)
    # This process has imported what one that trains imports, and done nothing yet.
    place = Place(processes, on_cpu, psutil.Process().memory_info().rss if on_cpu else 0)
    setup = dry_setup(run)
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
