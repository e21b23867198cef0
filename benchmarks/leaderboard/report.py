"""A leaderboard as files: `leaderboard.json`, `leaderboard.md` and `leaderboard.png`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from drafthead.heads.storage.files import write_text
from drafthead.lab.races.comparison import PLAIN, ComparisonRow
from drafthead.lab.races.divergence import Divergence
from drafthead.lab.races.racing import DRAFT_MODEL, LOOKUP
from drafthead.lab.reports.comparison import SPEED_COLUMNS, speed_cells
from drafthead.lab.reports.figures import OURS, THEIRS, save_figure
from drafthead.lab.reports.tables import markdown_table, number, print_table
from drafthead.lab.theory.speedup_model import speedup_bound
from drafthead.train.run.summary import RunSummary

RESULT = "leaderboard.json"

TRAINING_COLUMNS = (
    "entry", "family", "parameters", "steps", "seconds", "tokens seen", "tokens/s",
    "in the target", "tau: chain", "16 nodes", "32 nodes",
)  # fmt: skip
RACE_COLUMNS = ("mode", "nodes", *SPEED_COLUMNS)
PAIR_COLUMNS = ("entry", "tau", "alpha 1, 2, ...", "tokens/s", "speedup", "c")


@dataclass(frozen=True)
class EntryReport:
    """What is known of a head apart from the race."""

    name: str
    family: str
    baseline: str | None
    parameters: int  # that are trained
    training: RunSummary


@dataclass(frozen=True)
class Lap:
    """The race on one engine at one temperature."""

    engine: str
    temperature: float
    rows: list[ComparisonRow]
    divergences: list[Divergence]

    @property
    def title(self) -> str:
        """Engine and temperature."""
        return f"{self.engine} engine, temperature {self.temperature:g}"

    def ranked(self) -> list[ComparisonRow]:
        """The rows, the fastest first."""
        return sorted(self.rows, key=lambda row: -row.tokens_per_second)


@dataclass(frozen=True)
class BoardReport:
    """Everything that was measured; `about` holds machine, versions, command and settings."""

    about: dict[str, Any]
    entries: list[EntryReport]
    laps: list[Lap]

    def pairs(self) -> list[tuple[EntryReport, list[EntryReport]]]:
        """Each baseline with the entries that differ from it in one thing."""
        by_baseline = [
            (base, [entry for entry in self.entries if entry.baseline == base.name])
            for base in self.entries
        ]
        return [(base, others) for base, others in by_baseline if others]


def training_cells(entry: EntryReport) -> list[str]:
    """An entry's row of the table of training."""
    run = entry.training
    held_out = run.evaluation or {}
    trees = held_out.get("tau_tree", {})
    return [
        entry.name,
        entry.family,
        f"{entry.parameters / 1e6:.2f}M",
        str(run.steps),
        f"{run.seconds:.0f}",
        str(run.supervised_tokens),
        f"{run.supervised_tokens_per_s:.0f}",
        f"{100 * run.target_share:.0f} %",
        number(held_out.get("tau_chain")),
        number(trees.get("16")),
        number(trees.get("32")),
    ]


def race_cells(row: ComparisonRow) -> list[str]:
    """A row of the table of a lap."""
    nodes = None if row.draft_cost is None else row.tree_nodes
    return [row.mode, number(nodes, 1), *speed_cells(row, ranges=True)]


def acceptance_table(lap: Lap) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the acceptance by depth, for all that draft."""
    drafting = [row for row in lap.ranked() if row.acceptance_by_depth]
    deepest = max((len(row.acceptance_by_depth) for row in drafting), default=0)
    columns = ["mode", *(f"alpha {depth}" for depth in range(1, deepest + 1))]
    cells = [
        [row.mode, *(number(alpha) for alpha in row.acceptance_by_depth)]
        + ["-"] * (deepest - len(row.acceptance_by_depth))
        for row in drafting
    ]
    return columns, cells


def pair_table(report: BoardReport, lap: Lap) -> list[list[str]]:
    """Rows of every baseline and, below each, of the entries that differ from it in one thing."""
    cells = []
    for base, others in report.pairs():
        for entry in (base, *others):
            rows = [row for row in lap.rows if row.drafter == entry.name]
            for row in rows:
                mode = row.mode.removeprefix("head ")
                alphas = " ".join(number(alpha) for alpha in row.acceptance_by_depth)
                cells.append(
                    [
                        mode if entry is base else f"- {mode}",
                        number(row.tau),
                        alphas,
                        number(row.tokens_per_second, 1),
                        number(row.speedup),
                        number(row.draft_cost),
                    ]
                )
    return cells


def divergence_note(laps: Sequence[Lap]) -> str:
    """A sentence about greedy answers that differ from plain decoding's."""
    divergences = [divergence for lap in laps for divergence in lap.divergences]
    if not divergences:
        return "Greedy answers: all equal to plain decoding's."
    worst = max(divergences, key=lambda d: d.token_gap / d.rounding_step)
    return (
        f"Greedy answers: {len(divergences)} differ from plain decoding's on the same engine. "
        f"Where they first differ, the chosen token lies at most {worst.token_gap:.4f} below the "
        f"largest logit ({worst.token_gap / worst.rounding_step:.1f} rounding steps of its type)."
    )


def markdown(report: BoardReport) -> str:
    """The whole leaderboard as Markdown."""
    about = report.about
    machine = about["machine"]
    parts = [
        f"{machine['processor']}, {machine['threads']} threads, {about['dtype']}, "
        f"{about['prompts']} prompts, up to {about['max_new_tokens']} new tokens, "
        f"{about['rounds']} rounds; {about['minutes']:g} minutes of training for each head.",
        f"`{about['command']}`",
        "### Training",
        "Seconds are those of optimiser steps, the target's passes included, and of saving; "
        "loading and the last evaluation are not counted. tau on held-out answers: of the best "
        "chain, and of the best fixed trees.",
        markdown_table(TRAINING_COLUMNS, [training_cells(entry) for entry in report.entries]),
    ]
    for lap in report.laps:
        parts += [
            f"### Race: {lap.title}",
            markdown_table(RACE_COLUMNS, [race_cells(row) for row in lap.ranked()]),
            markdown_table(*acceptance_table(lap)),
        ]
        if pairs := pair_table(report, lap):
            parts += ["One thing at a time:", markdown_table(PAIR_COLUMNS, pairs)]
    return "\n\n".join([*parts, divergence_note(report.laps)]) + "\n"


def print_board(report: BoardReport) -> None:
    """Show the tables in the terminal."""
    cells = [training_cells(entry) for entry in report.entries]
    print_table("training", TRAINING_COLUMNS, cells)
    for lap in report.laps:
        print_table(lap.title, RACE_COLUMNS, [race_cells(row) for row in lap.ranked()])
        if pairs := pair_table(report, lap):
            print_table("one thing at a time", PAIR_COLUMNS, pairs)
    print(divergence_note(report.laps))


def write_board(report: BoardReport, folder: Path) -> None:
    """Write picture, Markdown and, last, the JSON: it marks the race as done."""
    folder.mkdir(parents=True, exist_ok=True)
    draw(report, folder / "leaderboard.png")
    write_text(folder / "leaderboard.md", markdown(report))
    content = {
        **report.about,
        "entries": [asdict(entry) for entry in report.entries],
        "laps": [asdict(lap) for lap in report.laps],
    }
    write_text(folder / RESULT, json.dumps(content, indent=2) + "\n")
    print(f"written: {folder / RESULT}, leaderboard.md, leaderboard.png")


@dataclass(frozen=True)
class StepShares:
    """The parts of a step, as shares of a plain one."""

    draft: float
    verify: float
    host: float


def step_shares(row: ComparisonRow, plain: ComparisonRow) -> StepShares:
    """The phases of a row's average step, in units of a plain step."""
    t_1 = plain.seconds / max(1, plain.tokens)
    steps = max(1, sum(row.accept_length_counts.values()))
    seconds = {phase: total / steps / t_1 for phase, total in row.phase_seconds.items()}
    return StepShares(seconds["draft"], seconds["verify"], seconds["accept"] + seconds["commit"])


def draw(report: BoardReport, path: Path) -> None:
    """tau against draft cost, one panel per lap, with lines of equal speedup."""
    engines = list(dict.fromkeys(lap.engine for lap in report.laps))
    temperatures = list(dict.fromkeys(lap.temperature for lap in report.laps))
    figure, axes = plt.subplots(
        len(engines),
        len(temperatures),
        figsize=(7 * len(temperatures), 5.5 * len(engines)),
        squeeze=False,
    )
    for lap in report.laps:
        place = engines.index(lap.engine), temperatures.index(lap.temperature)
        draw_lap(axes[place], lap)
    about = report.about
    figure.suptitle(
        f"{about['target']} on {about['machine']['processor']}, {about['dtype']}; "
        f"{about['minutes']:g} minutes of training for each head",
        fontsize=10,
    )
    figure.tight_layout()
    save_figure(figure, path)


def draw_lap(axes: Axes, lap: Lap) -> None:
    """One point per drafter; the lines are the bound at the lap's median verification time."""
    plain = next(row for row in lap.rows if row.mode == PLAIN)
    drafting = [row for row in lap.rows if row.draft_cost is not None]
    shares = {row.mode: step_shares(row, plain) for row in drafting}
    verify = median(share.verify for share in shares.values())
    host = median(share.host for share in shares.values())
    costs = np.linspace(0, 1.25 * max(row.draft_cost or 0 for row in drafting) + 0.05, 60)
    taus = np.linspace(1, 1.1 * max(row.tau or 1 for row in drafting) + 0.1, 60)
    bounds = [[speedup_bound(tau, verify, cost, host, t_1=1.0) for cost in costs] for tau in taus]
    lines = axes.contour(costs, taus, bounds, levels=12, colors="#c8c8c8", linewidths=0.8)
    axes.clabel(lines, fmt="%.2fx", fontsize=7)
    for row in drafting:
        colour = THEIRS if row.mode in (LOOKUP, DRAFT_MODEL) else OURS
        point = (row.draft_cost or 0.0, row.tau or 1.0)
        axes.scatter(*point, color=colour, zorder=3, s=24)
        label = f"{row.mode.removeprefix('head ')} {row.speedup:.2f}x"
        axes.annotate(
            label, (row.draft_cost or 0, row.tau or 1), xytext=(5, 4),
            textcoords="offset points", fontsize=8,
        )  # fmt: skip
    axes.set_xlabel("c: drafting time of a step / time of plain decoding a token")
    axes.set_ylabel("tau: tokens per pass of the target")
    axes.set_title(
        f"{lap.title}\nlines: speedup if verifying takes {verify:.2f} and the rest {host:.2f} "
        "of a plain token",
        fontsize=9,
    )
