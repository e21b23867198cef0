"""A comparison as files: `comparison.json`, `comparison.md`, and a picture for users.

`comparison_details.png` is another one, of where the time goes.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from drafthead.heads.storage.files import write_text
from drafthead.lab.races.comparison import ComparisonRow
from drafthead.lab.races.contestants import Transformers
from drafthead.lab.races.divergence import Divergence
from drafthead.lab.reports.figures import BASELINE, OURS, THEIRS, save_figure
from drafthead.lab.reports.predictions import prediction_note
from drafthead.lab.reports.tables import markdown_table, number, print_table

LISTED_DIVERGENCES = 10
SPEED_COLUMNS = (
    "tokens/s", "speedup", "over generate", "tau", "c", "bound", "efficiency", "8-grams again",
)  # fmt: skip
COLUMNS = ("mode", "T", "nodes", *SPEED_COLUMNS)
NAMES = {"plain": "plain decoding", "generate": "model.generate"}  # the baselines, in the picture
TAU_NOTE = (
    "tau is of the trees that the planner chose for this machine (nodes); drafthead evaluate has "
    "that of larger ones, at every step"
)


def speed_cells(row: ComparisonRow, ranges: bool) -> list[str]:
    """The cells under SPEED_COLUMNS; `ranges` adds the extremes over rounds to the speedup, if they
    differ.
    """
    low, high = row.speedup_range
    return [
        number(row.tokens_per_second, 1),
        number(row.speedup) + (f" ({low:.2f} to {high:.2f})" if ranges and low < high else ""),
        number(row.speedup_hf),
        number(row.tau),
        number(row.draft_cost),
        number(row.speedup_bound),
        number(row.efficiency),
        f"{100 * row.repeated_8gram_share:.0f} %",
    ]


def cells(row: ComparisonRow, ranges: bool) -> list[str]:
    """One row of the table as text."""
    nodes = number(row.tree_nodes or None, 1)
    return [row.mode, f"{row.temperature:g}", nodes, *speed_cells(row, ranges)]


def comparison_table(rows: Sequence[ComparisonRow]) -> str:
    """The comparison as a Markdown table."""
    return markdown_table(COLUMNS, [cells(row, ranges=True) for row in rows])


def category_tables(rows: Sequence[ComparisonRow]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Titles, columns and rows of tables by category of prompts; none where prompts have none."""
    shown = [row for row in rows if row.categories]
    names = sorted({name for row in shown for name in row.categories})
    columns = ["mode", "T", *names]

    def table(field: str) -> list[list[str]]:
        return [
            [row.mode, f"{row.temperature:g}"]
            + [number(getattr(row.categories[name], field)) for name in names]
            for row in shown
        ]

    if len(names) < 2:
        return {}
    return {f"{title} by category": (columns, table(title)) for title in ("speedup", "tau")}


def predictions(rows: Sequence[ComparisonRow]) -> list[str]:
    """A sentence for each chain: what Leviathan et al. predict, and why that is not measured."""
    return [
        prediction_note(
            f"{row.mode}, T {row.temperature:g}",
            row.chain_prediction,
            row.speedup,
            row.prediction_factors,
        )
        for row in rows
        if row.chain_prediction is not None
    ]


def divergence_notes(
    divergences: Sequence[Divergence], rows: Sequence[ComparisonRow], prompts: int
) -> list[str]:
    """Sentences about greedy answers that differ from plain decoding's, theirs apart from ours."""
    greedy = [row for row in rows if row.temperature == 0]
    theirs = {row.mode for row in greedy if row.verifier == Transformers.verifier}
    ours = sorted((d for d in divergences if d.mode not in theirs), key=lambda d: -d.top2_gap)
    answers = (len(greedy) - len(theirs) - 1) * prompts  # plain decoding's own are not counted
    notes = [f"greedy answers: all {answers} are plain decoding's"]
    if ours:
        notes = [
            f"greedy answers: {len(ours)} of {answers} differ from plain decoding's; first "
            "differences:"
        ]
    notes += [
        f"- {d.mode}, prompt {d.prompt}, token {d.position}: {d.token} instead of {d.plain_token}, "
        f"top-2 logit gap {d.top2_gap:.4f}"
        for d in ours[:LISTED_DIVERGENCES]
    ]
    count = len(divergences) - len(ours)
    total = len(theirs) * prompts
    return [*notes, f"transformers' own: {count} of {total} differ, where torch's kernels round"]


def print_report(rows: Sequence[ComparisonRow], notes: Sequence[str]) -> None:
    """Show the table and the notes in the terminal."""
    title = "speedup over plain decoding on the same engine"
    for name, (columns, table) in category_tables(rows).items():
        print_table(name, columns, table)
    notes = [TAU_NOTE, *notes]
    print_table(title, COLUMNS, [cells(row, ranges=False) for row in rows], notes)


def draw(rows: Sequence[ComparisonRow], title: str, path: Path) -> None:
    """How many times as fast as `model.generate` each way is; one panel per temperature."""
    temperatures = sorted({row.temperature for row in rows})
    height = len(temperatures) + 0.35 * len(rows) + 0.8
    figure, axes = plt.subplots(len(temperatures), 1, figsize=(9, height), squeeze=False)
    for (speeds,), temperature in zip(axes, temperatures, strict=True):
        _draw_speeds(speeds, [r for r in rows if r.temperature == temperature][::-1], temperature)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    save_figure(figure, path)


def draw_phases_and_bounds(rows: Sequence[ComparisonRow], title: str, path: Path) -> None:
    """The phases of a step, and what they allow beside what was measured; for the curious."""
    temperatures = sorted({row.temperature for row in rows})
    height = max(0.7 + 0.5 * len(rows) + len(temperatures), 4.5 * len(temperatures))
    figure, axes = plt.subplots(len(temperatures), 2, figsize=(13, height), squeeze=False)
    for (phases, bounds), temperature in zip(axes, temperatures, strict=True):
        chosen = [row for row in rows if row.temperature == temperature][::-1]
        _draw_phases(phases, [row for row in chosen if row.phase_seconds])
        _draw_bounds(bounds, [row for row in chosen if row.speedup_bound is not None])
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    save_figure(figure, path)


def _draw_speeds(axes: Axes, rows: Sequence[ComparisonRow], temperature: float) -> None:
    names = [NAMES.get(row.mode, row.mode) for row in rows]
    colours = [BASELINE if row.mode in NAMES else OURS if row.tau else THEIRS for row in rows]
    bars = axes.barh(names, [row.speedup_hf for row in rows], color=colours)
    labels = [f"{row.speedup_hf:.2f}  ({row.tokens_per_second:.0f} tokens/s)" for row in rows]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.axvline(1, color=BASELINE, linewidth=1, linestyle=":")
    axes.margins(x=0.3)  # room for the labels
    axes.set_xlabel(f"times as fast as transformers' model.generate, temperature {temperature:g}")


def _draw_phases(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    left = [0.0] * len(rows)
    for phase, colour in (
        ("draft", "#e09f3e"), ("verify", OURS), ("accept", "#9e2a2b"), ("commit", "#540b0e"),
    ):  # fmt: skip
        width = [1000 * row.phase_seconds[phase] / max(1, row.steps or 0) for row in rows]
        axes.barh([row.mode for row in rows], width, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.set_xlabel("milliseconds per step")
    axes.legend(fontsize=8)


def _draw_bounds(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    """Measured speedups against those that the phases of a step allow; grey is up to 10 % less."""
    bounds = [row.speedup_bound or 0.0 for row in rows]
    ends = [0.9 * min([1.0, *bounds]), 1.1 * max([1.0, *bounds])]
    axes.plot(ends, ends, color=BASELINE, linewidth=1)
    axes.fill_between(ends, [0.9 * end for end in ends], ends, color=BASELINE, alpha=0.15)
    for place, (row, bound) in enumerate(zip(rows[::-1], bounds[::-1], strict=True), 1):
        label = f"{place}  {row.mode}"
        axes.plot(bound, row.speedup, "o", color=OURS, markersize=5, label=label)
        axes.annotate(
            str(place),
            (bound, row.speedup),
            xytext=(5, -10),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xlabel("speedup that the phases of a step allow")
    axes.set_ylabel("measured speedup")
    axes.legend(fontsize=8, handlelength=0, markerscale=0)


def write_report(
    rows: Sequence[ComparisonRow], notes: Sequence[str], about: dict[str, Any], folder: Path
) -> None:
    """Write JSON, Markdown and picture; `about` holds machine, versions, command and settings."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {**about, "rows": [asdict(row) for row in rows], "notes": list(notes)}
    write_text(folder / "comparison.json", json.dumps(content, indent=2) + "\n")
    machine, batch = about["machine"], about["batch_size"]
    text = [
        f"{machine['processor']}, {machine['threads']} threads, {about['dtype']}, "
        f"{about['prompts']} prompts, up to {about['max_new_tokens']} new tokens, "
        f"{about['rounds']} rounds" + (f", {batch} at a time." if batch > 1 else "."),
        f"`{about['command']}`",
        comparison_table(rows),
        *(f"{name}:\n\n{markdown_table(*table)}" for name, table in category_tables(rows).items()),
        *notes,
    ]
    write_text(folder / "comparison.md", "\n\n".join(text) + "\n")
    title = (
        f"{Path(about['target']).name}, {about['dtype']}, {about['prompts']} prompts\n"
        f"{machine['processor']}, {machine['threads']} threads"
    )
    draw(rows, title, folder / "comparison.png")
    draw_phases_and_bounds(rows, title, folder / "comparison_details.png")
    print(
        f"written: {folder / 'comparison.json'}, comparison.md, comparison.png, "
        "comparison_details.png"
    )
