"""A training run and what was measured of its head, as one page that works offline."""

import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter, MaxNLocator
from pydantic import TypeAdapter, ValidationError

from drafthead.core.errors import UserError, first_line
from drafthead.core.storage.files import json_lines
from drafthead.heads.formats.files import read_json
from drafthead.lab.diagnosis.findings import Finding, faults_first
from drafthead.lab.learning_curve import what_more_would_bring
from drafthead.lab.races.comparison import ComparisonRow
from drafthead.lab.reports.comparison import (
    EXPLAINED,
    category_tables,
    fastest,
    headline,
    named,
    race_table,
)
from drafthead.lab.reports.report import (
    OURS,
    THEIRS,
    Report,
    Table,
    machine_line,
    number,
    page,
    png,
)
from drafthead.train.run.folder import EVALUATION_FILE, METRICS_FILE, summarize

SMOOTHED = 50  # points of a curve at most; each is a mean of neighbouring steps


@dataclass(frozen=True)
class Section:
    """A part of the page, in this order; `text` is folded under `summary`."""

    title: str
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[str] = ()  # PNG files in base64
    pages: Sequence[str] = ()  # whole pages, each in a frame
    summary: str = ""
    text: str = ""
    headline: str = ""  # at the head of the page


def run_page(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """The page, of today. All text is escaped."""
    dated = [*facts, ("date", date.today().isoformat())]
    return page("run_page.html", {"title": title, "facts": dated, "sections": sections})


def report_of(
    run: Path, races: Sequence[Path] = (), doctor: Path | None = None, traces: Sequence[Path] = ()
) -> str:
    """The page of a training run and of what was measured of its head."""
    record, summary = read_json(run / "run.json"), summarize(run)
    settings = record["settings"]
    text = yaml.safe_dump(settings, sort_keys=False)
    sections = [
        training_section(run),
        *([held_out_section(summary.evaluation)] if summary.evaluation else []),
        *map(comparison_section, races),
        *([doctor_section(doctor)] if doctor is not None else []),
        *map(trace_section, traces),
        Section("Settings", summary="the run's configuration", text=text),
    ]
    data = settings["data"]["train"]  # one source, or several with weights
    minutes, versions = round(summary.seconds / 60, 1), record["versions"].items()
    # The target's name alone: the page is made to be sent, and the path is in the settings.
    target, family = Path(settings["target"]["name"]).name, settings["head"]["family"]
    facts = [
        ("target", target),
        ("family", family),
        ("data", data if isinstance(data, str) else json.dumps(data)),
        ("trained on", f"{summary.supervised_tokens:,} tokens in {minutes:g} minutes"),
        ("finished", "yes" if record["finished"] else "no"),
        ("versions", ", ".join(f"{name} {one}" for name, one in versions)),
    ]
    return run_page(f"{family} for {target}", facts, sections)


def training_section(folder: Path) -> Section:
    """Charts of the loss and of drafting held-out answers, against the tokens trained on."""
    steps = list(json_lines(folder / METRICS_FILE))
    evaluations = list(json_lines(folder / EVALUATION_FILE))
    tokens = {step["step"]: step["supervised_tokens"] for step in steps}
    held_out = [(tokens[e["step"]], e["tau_chain"]) for e in evaluations if e["step"] in tokens]
    names = ["loss", "drafted tokens right in a row, all positions"]
    names += ["tau of held-out answers, a chain"] if held_out else []
    figure, axes = plt.subplots(1, len(names), figsize=(14 * len(names) / 3, 3.5))
    for ax, key in zip(axes, ("loss", "right_in_a_row"), strict=False):
        ax.plot(*curve(steps, key), ".-", color=OURS)  # points, as there may be one step
    for ax, name in zip(axes, names, strict=True):
        ax.set_xlabel("tokens trained on")
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20k
        ax.set_ylabel(name)
    if held_out:
        axes[2].plot(*zip(*held_out, strict=True), "o", color=THEIRS)
    return Section(
        "Training", what_more_would_bring(folder), pictures=[b64encode(png(figure)).decode()]
    )


def curve(steps: Sequence[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Tokens and values of at most SMOOTHED groups of steps, each by its mean.

    Four steps in groups of two: tokens 1 2 3 4 and values 6 4 2 0 become 1.5 3.5 and 5 1.
    """
    size = -(-len(steps) // SMOOTHED)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]

    def means(name: str) -> list[float]:
        return [sum(step[name] for step in group) / len(group) for group in groups]

    return means("supervised_tokens"), means(key)


def held_out_section(last: dict[str, Any]) -> Section:
    """The last evaluation of a run: tau by size of the tree, acceptance by depth."""
    sizes = last["tau_tree"]
    taus = [number(last["tau_chain"]), *(number(tau) for tau in sizes.values())]
    depths = [f"depth {k}" for k in range(1, len(last["alpha"]) + 1)]
    return Section(
        "On held-out answers",
        notes=[f"{last['anchors']} tokens, after step {last['step']}."],
        tables=[
            Table("tokens per pass", ["chain", *(f"{size} nodes" for size in sizes)], [taus]),
            Table(
                "first guesses that are right, where all before them were",
                depths,
                [list(map(number, last["alpha"]))],
            ),
        ],
    )


def read_race(folder: Path) -> tuple[list[ComparisonRow], dict[str, Any]]:
    """The rows of a race of `drafthead compare`, and all that its file says."""
    file = folder / "comparison.json"
    content = read_json(file)
    try:
        rows = TypeAdapter(list[ComparisonRow]).validate_python(content["rows"])
        machine_line(content)
    except (KeyError, ValidationError) as error:
        reason = first_line(error)
        raise UserError(f"{file} is not a race of `drafthead compare`: {reason}") from error
    return rows, content


def comparison_section(folder: Path) -> Section:
    """A race of `drafthead compare`, with its picture."""
    rows, content = read_race(folder)
    picture = folder / "comparison.png"
    return Section(
        "Race",
        notes=[machine_line(content), EXPLAINED],
        tables=[race_table(rows), *category_tables(rows)],
        pictures=[b64encode(picture.read_bytes()).decode()] if picture.exists() else [],
        summary="notes of the race",
        text="\n".join(content.get("notes", [])),
        headline=headline(fastest(rows), content["prompts"], named),
    )


def doctor_section(file: Path) -> Section:
    """Return what `drafthead head doctor --output FILE` has found, faults first."""
    try:
        findings = TypeAdapter(dict[str, Finding]).validate_python(read_json(file)["findings"])
    except (KeyError, ValidationError) as error:
        raise UserError(f"{file} is not what `drafthead head doctor --output` writes") from error
    return Section("Doctor", tables=[findings_table(findings, "")])


def findings_table(findings: dict[str, Finding], title: str) -> Table:
    """Return what the doctor has found, faults first."""
    rows = [
        [name, "yes" if found.is_fault else "no", found.evidence, found.remedy or ""]
        for name, found in faults_first(findings).items()
    ]
    return Table(title, ["fault", "found", "what was seen", "what to do"], rows, words=True)


def findings_report(
    findings: dict[str, Finding], about: dict[str, Any], notes: Sequence[str] = ()
) -> Report:
    """The findings of a verb; `about` holds machine, command and what was looked at."""
    faults = sum(found.is_fault for found in findings.values())
    table = findings_table(findings, f"{len(findings)} checks, faults: {faults}")
    return Report(
        [table], notes, about | {"findings": {name: asdict(one) for name, one in findings.items()}}
    )


def trace_section(file: Path) -> Section:
    """A page of `drafthead explain trace`, in a frame."""
    try:
        page = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the trace {file}: {error}") from error
    return Section(f"An answer, step by step ({file.name})", pages=[page])
