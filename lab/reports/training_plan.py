"""The plan of `train --plan`: tables of memory, disk and time, and whether the run fits."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.lab.planned_training import TrainingPlan
from drafthead.lab.planning.estimate import LIBRARIES, Setup
from drafthead.lab.reports.report import Report, Table
from drafthead.train.run.config import Duration

HOW = {LIBRARIES: "measured"}


def plan_report(plan: TrainingPlan) -> Report:
    """The plan as tables, with all its figures as JSON; sizes are bytes there."""
    unit, name = (1e9, "GB") if plan.computed >= 1e10 else (1e6, "MB")
    speeds, disk = speed_rows(plan), plan.disk
    memory_rows = [
        *(
            (part, f"{size / unit:.1f}", HOW.get(part, "computed"))
            for part, size in plan.held.items()
        ),
        ("held throughout", f"{plan.computed / unit:.1f}", "computed"),
    ]
    if plan.trial is not None:
        memory_rows.append(("peak of real steps", f"{plan.trial.peak / unit:.1f}", "measured"))
    disk_rows = [("saved states, one being written", disk.states), ("head", disk.head)]
    title = f"{plan.config.family} for {plan.config.target.name}: memory of a process"
    tables = [
        Table(title, ("part", name, "how"), memory_rows),
        Table("disk", ("what", name), [(what, f"{size / unit:.1f}") for what, size in disk_rows]),
        Table("time", ("what", "value", "unit"), speeds),
    ]
    return Report(tables, [*notes_on(plan), plan.verdict()], as_json(plan, speeds))


def as_json(plan: TrainingPlan, speeds: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The plan as JSON holds it."""
    trial = plan.trial
    return {
        "settings": plan.config.settings(),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "processes": plan.processes,
        "parameters": parameters(plan.setup),
        "memory": {
            "held": plan.held,
            "computed": plan.computed,
            "measured": trial and trial.peak,
            "needed": plan.needed,
            "there": plan.room,
            "fits": plan.fits,
        },
        "disk": {**asdict(plan.disk), "states": plan.disk.states},
        "speed": {"rows": speeds, "trial": trial and asdict(trial)},
        "not_tried": plan.untried or None,
        "verdict": plan.verdict(),
    }


def parameters(setup: Setup) -> dict[str, int]:
    """How many numbers the target and the head have, and how many of the head's are trained."""
    return {
        "target": sum(weight.numel() for weight in setup.target.model.parameters()),
        "head": sum(weight.numel() for weight in setup.head.parameters()),
        "trained": sum(weight.numel() for weight in setup.trained),
    }


def speed_rows(plan: TrainingPlan) -> list[list[str]]:
    """A line for each speed and duration that is known."""
    rows, config, there = [], plan.config, plan.setup.rows
    lasts = None  # where epochs have no rows
    if there is not None or config.train.epochs is None:
        lasts = Duration.of(config.train, 0 if there is None else len(there.rows))
    speed = plan.trial and plan.trial.tokens_per_s * plan.processes
    if speed:
        rows.append(["supervised tokens", f"{speed:.0f}", "1/s"])
    if plan.trial is not None and config.data.feature_folder is not None:
        kept = plan.trial.tokens_per_s_kept * plan.processes
        rows.append(["supervised tokens, once features are kept", f"{kept:.0f}", "1/s"])
    if plan.tokens is not None and speed:
        rows.append([f"{plan.tokens:.3g} tokens", f"{plan.tokens / speed / 3600:.2f}", "h"])
    seconds = tokens = None
    if lasts is not None and lasts.unit == "s":
        seconds, tokens = lasts.limit, lasts.limit * speed if speed else None
    elif lasts is not None and there is not None:
        rows.append(["the configuration", f"{lasts.limit:.0f}", "steps"])
        per_row = there.supervised_tokens / len(there.rows)
        tokens = lasts.limit * per_row * config.train.batch_rows
        seconds = tokens / speed if speed else None
    rows += [["the configuration", f"{tokens:.0f}", "supervised tokens"]] if tokens else []
    rows += [["the configuration", f"{seconds / 3600:.2f}", "h"]] if seconds else []
    return rows


def notes_on(plan: TrainingPlan) -> list[str]:
    """Return what the tables do not say themselves."""
    sizes, processes, trial = parameters(plan.setup), plan.processes, plan.trial
    notes = [
        f"{sizes['trained'] / 1e6:.2f}M parameters are trained, of the head's "
        f"{sizes['head'] / 1e6:.2f}M; the target has {sizes['target'] / 1e6:.2f}M",
        "real steps show the memory of a run's beginning: on a CPU a process grows for dozens of "
        "steps, up to twice as large in one that was watched",
    ]
    if plan.setup.rows is None:
        notes.append("the target has no tokenizer here: the rows are not known")
    if processes > 1:
        notes.append(
            f"{processes} processes: this device's memory and gradients to exchange, and this "
            f"device's speed times {processes}, an upper bound, untested"
        )
    if trial is None:
        return [*notes, f"the speed was not measured: {plan.untried}"]
    return [
        *notes,
        f"measured in {trial.steps} steps of {trial.rows} rows on this machine; "
        "evaluations and saving come on top",
    ]
