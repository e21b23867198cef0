"""The plan of `plan-training`: tables of memory, disk and time, sentences, and a JSON file."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafthead.heads.storage.files import write_text
from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.lab.planning.disk import DiskUse
from drafthead.lab.planning.dry_setup import DrySetup
from drafthead.lab.planning.estimate import ALLOCATOR, LIBRARIES, Estimate, Place, Remedy
from drafthead.lab.planning.shares import BUCKETS, GATHERED, MASTER
from drafthead.lab.planning.step_memory import ACTIVATIONS, PARTS, trained
from drafthead.lab.planning.trial import Trial
from drafthead.lab.reports.tables import print_table
from drafthead.train.learning.loop import Duration
from drafthead.train.run.config import RunConfig

ORDER = (LIBRARIES, *PARTS, MASTER, GATHERED, BUCKETS, ALLOCATOR)
HOW = {LIBRARIES: "measured", ALLOCATOR: "allowance"}
PHASES = {ACTIVATIONS: "head's forward pass and losses"}


@dataclass(frozen=True)
class TrainingPlan:
    """All that is known of a run before it."""

    config: RunConfig
    setup: DrySetup
    place: Place
    estimate: Estimate
    disk: DiskUse
    trial: Trial | None
    untried: str  # why there was no trial
    room: int  # bytes that a device has, or the machine
    tokens: float | None  # supervised tokens that are wanted

    @property
    def needed(self) -> int:
        """The bytes of a process, measured if one like it was tried; on a CPU, of all of them."""
        one = self.estimate.total
        if self.trial is not None and self.place.processes == 1 and self.place.engine == "ddp":
            one = self.trial.peak
        return one * self.place.processes if self.place.on_cpu else one

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.needed <= self.room

    @property
    def tokens_per_step(self) -> float | None:
        """Supervised tokens of a step, on average; None without rows."""
        rows = self.setup.rows
        if rows is None:
            return None
        return rows.supervised_tokens / len(rows.rows) * self.config.train.batch_rows

    @property
    def duration(self) -> Duration | None:
        """How long the configuration trains; None where its epochs have no rows."""
        rows = self.setup.rows
        if rows is None and self.config.train.epochs is not None:
            return None
        return Duration.of(self.config.train, 0 if rows is None else len(rows.rows))

    def record(self) -> dict[str, Any]:
        """The plan as JSON holds it; sizes are bytes."""
        memory, trial = self.estimate.memory, self.trial
        return {
            "settings": self.config.settings(),
            "machine": describe_machine(),
            "versions": describe_versions(),
            "engine": self.place.engine,
            "processes": self.place.processes,
            "parameters": parameters(self.setup),
            "memory": {
                "parts_at_peak": dict(self.estimate.parts),
                "held": memory.held,
                "peak_phase": PHASES.get(memory.peak_phase, memory.peak_phase),
                "computed": self.estimate.total,
                "measured": trial and trial.peak,
                "needed": self.needed,
                "there": self.room,
                "fits": self.fits,
            },
            "disk": {**asdict(self.disk), "states": self.disk.states},
            "speed": {"rows": speed_rows(self), "trial": trial and asdict(trial)},
            "not_tried": self.untried or None,
        }


def parameters(setup: DrySetup) -> dict[str, int]:
    """How many numbers the target and the head have, and how many of the head's are trained."""
    return {
        "target": sum(weight.numel() for weight in setup.target.model.parameters()),
        "head": sum(weight.numel() for weight in setup.head.parameters()),
        "trained": sum(weight.numel() for weight in trained(setup.head)),
    }


def print_training_plan(plan: TrainingPlan, remedies: Sequence[Remedy]) -> None:
    """Show the plan in the terminal."""
    unit, name = (1e9, "GB") if plan.estimate.total >= 1e10 else (1e6, "MB")
    sizes = parameters(plan.setup)
    print_table(
        f"{plan.config.family} for {plan.config.target.name}: memory of a process",
        ("part", name, f"at the peak, {name}", "how"),
        memory_rows(plan, unit),
        [
            f"{sizes['trained'] / 1e6:.2f}M parameters are trained, of the head's "
            f"{sizes['head'] / 1e6:.2f}M; the target has {sizes['target'] / 1e6:.2f}M",
            *memory_notes(plan),
        ],
    )
    print_table("disk", ("what", name), disk_rows(plan.disk, unit))
    print_table("time", ("what", "value", "unit"), speed_rows(plan), speed_notes(plan))
    if remedies:
        rows = [
            [r.setting, f"{(plan.estimate.total - r.total) / unit:.0f}", f"{r.total / unit:.0f}"]
            for r in remedies
        ]
        columns = ("setting, each alone", f"saves, {name}", f"then a process needs, {name}")
        print_table("what would help, the cheapest first", columns, rows)
    print_table("", (), (), [verdict(plan, remedies)])


def memory_rows(plan: TrainingPlan, unit: float) -> list[list[str]]:
    """A line for each part, and the sums."""
    parts, memory = plan.estimate.parts, plan.estimate.memory
    rows = []
    for part in ORDER:
        most = max(memory.most_of(part), parts[part])
        if most:
            cells = [f"{value / unit:.1f}" for value in (most, parts[part])]
            rows.append([part, *cells, HOW.get(part, "computed")])
    rows.append(["sum", "", f"{plan.estimate.total / unit:.1f}", "computed"])
    if plan.trial is not None:
        rows.append(["peak of real steps", "", f"{plan.trial.peak / unit:.1f}", "measured"])
    return rows


def memory_notes(plan: TrainingPlan) -> list[str]:
    """What the table of memory does not say itself."""
    memory, notes = plan.estimate.memory, []
    phase = PHASES.get(memory.peak_phase, memory.peak_phase)
    notes.append(f"the peak is in the {phase}; a part may be larger elsewhere")
    if plan.setup.rows is None:
        notes.append("the target has no tokenizer here: all rows are taken to be full")
    if plan.place.on_cpu:
        notes.append(
            "this is the need of the first steps: a process on a CPU grows for dozens of steps, up "
            "to twice as large in one that was watched"
        )
    else:
        notes.append("on a GPU nobody has compared these sums with a run yet")
    if plan.place.processes > 1 or plan.place.engine != "ddp":
        notes.append(
            f"{plan.place.processes} processes under {plan.place.engine}: computed, untested"
        )
    return notes


def disk_rows(disk: DiskUse, unit: float) -> list[list[str]]:
    """A line for each kind of file."""
    rows = [
        ["saved states: two are kept while a third is written", f"{disk.states / unit:.1f}"],
        ["head", f"{disk.head / unit:.1f}"],
    ]
    if disk.feature_rows:
        kept = f"features of {disk.feature_rows} rows"
        rows.append([kept, f"{disk.features / unit:.1f}"])
    return rows


def speed_rows(plan: TrainingPlan) -> list[list[str]]:
    """A line for each speed and duration that is known."""
    rows, duration, per_step = [], plan.duration, plan.tokens_per_step
    if duration is not None and duration.unit == "step" and per_step is not None:
        rows.append(["the configuration", f"{duration.limit:.0f}", "steps"])
        rows.append(["the configuration", f"{duration.limit * per_step:.0f}", "supervised tokens"])
    if plan.trial is None:
        return rows
    speed = plan.trial.tokens_per_s * plan.place.processes
    rows.append(["supervised tokens", f"{speed:.0f}", "1/s"])
    if plan.config.data.feature_folder is not None:
        kept = plan.trial.tokens_per_s_kept * plan.place.processes
        rows.append(["the same, once features are kept", f"{kept:.0f}", "1/s"])
    if plan.tokens is not None:
        rows.append([f"{plan.tokens:.3g} tokens", f"{plan.tokens / speed / 3600:.2f}", "h"])
    if duration is not None and duration.unit == "s":
        rows.append(["the configuration", f"{duration.limit / 3600:.2f}", "h"])
        rows.append(["the configuration", f"{duration.limit * speed:.0f}", "supervised tokens"])
    elif duration is not None and per_step is not None:
        hours = duration.limit * per_step / speed / 3600
        rows.append(["the configuration", f"{hours:.2f}", "h"])
    return rows


def speed_notes(plan: TrainingPlan) -> list[str]:
    """How the speed was found."""
    if plan.trial is None:
        return [f"the speed was not measured: {plan.untried}"]
    notes = [
        f"measured in {len(plan.trial.steps)} steps of {plan.trial.steps[0].rows} rows on this "
        "machine; evaluations and saving come on top"
    ]
    if plan.place.processes > 1:
        notes.append(
            f"for {plan.place.processes} devices: this device's speed times "
            f"{plan.place.processes}, an upper bound, untested"
        )
    return notes


def verdict(plan: TrainingPlan, remedies: Sequence[Remedy]) -> str:
    """One sentence: whether it fits, and if not, what to change first."""
    processes = plan.place.processes if plan.place.on_cpu else 1
    need = f"{plan.needed / 1e9:.2f} GB of memory, and there are {plan.room / 1e9:.2f} GB"
    if plan.fits:
        return f"it fits: the run needs about {need}"
    one = plan.estimate.total
    for remedy in remedies:
        if plan.needed - processes * (one - remedy.total) <= plan.room:
            return (
                f"it does not fit: the run needs about {need}; with {remedy.setting} it would fit"
            )
    return f"it does not fit: the run needs about {need}; no single setting above suffices"


def write_training_plan(plan: TrainingPlan, remedies: Sequence[Remedy], output: Path) -> None:
    """Write the plan as JSON."""
    record = {
        **plan.record(),
        "remedies": [asdict(remedy) for remedy in remedies],
        "verdict": verdict(plan, remedies),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, json.dumps(record, indent=2) + "\n")
    print(f"written: {output}")
