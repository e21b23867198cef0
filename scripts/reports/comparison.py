"""A comparison as files: `comparison.json`, `comparison.md` and `comparison.png`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from drafthead.heads.files import write_text
from drafthead.infer.measuring.comparison import ComparisonRow
from drafthead.scripts.reports.tables import BASELINE, OURS, THEIRS, print_table, save_figure

COLUMNS = (
    "mode", "T", "nodes", "tokens/s", "speedup", "over generate", "tau", "c", "bound", "efficiency",
    "8-grams again",
)  # fmt: skip


def cells(row: ComparisonRow, ranges: bool) -> list[str]:
    """One row of the table as text; a dash where a number does not exist.

    `ranges` adds the extremes over the rounds to the speedup.
    """
    extremes = f" ({row.speedup_range[0]:.2f} to {row.speedup_range[1]:.2f})" if ranges else ""

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return [
        row.mode,
        f"{row.temperature:g}",
        f"{row.tree_nodes:.1f}" if row.tree_nodes else "-",
        f"{row.tokens_per_second:.1f}",
        f"{row.speedup:.2f}{extremes}",
        f"{row.speedup_hf:.2f}",
        number(row.tau),
        number(row.draft_cost),
        number(row.speedup_bound),
        number(row.efficiency),
        f"{100 * row.repeated_8gram_share:.0f} %",
    ]


def markdown_table(rows: Sequence[ComparisonRow]) -> str:
    """The comparison as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    return "\n".join(lines + ["| " + " | ".join(cells(row, ranges=True)) + " |" for row in rows])


def predictions(rows: Sequence[ComparisonRow]) -> list[str]:
    """A sentence for each chain: Leviathan's prediction and the best length."""
    return [
        f"{row.mode}, T {row.temperature:g}: alpha {p.alpha:.2f}, c {p.cost:.3f} a token; the "
        f"formula predicts {p.speedup:.2f}x (measured {row.speedup:.2f}x), "
        f"and {p.best_speedup:.2f}x for its best length {p.best_length}"
        for row in rows
        if (p := row.chain_prediction) is not None
    ]


def print_report(rows: Sequence[ComparisonRow], notes: Sequence[str]) -> None:
    """Show the table and the notes in the terminal."""
    title = "speedup is over plain decoding on the same engine"
    print_table(title, COLUMNS, [cells(row, ranges=False) for row in rows], notes)


def draw(rows: Sequence[ComparisonRow], title: str, path: Path) -> None:
    """Bars of tokens/s beside the shares of a step, one group a temperature."""
    temperatures = sorted({row.temperature for row in rows})
    figure, axes = plt.subplots(
        len(temperatures), 2, figsize=(12, 0.7 + 0.5 * len(rows) + len(temperatures)), squeeze=False
    )
    for (speeds, phases), temperature in zip(axes, temperatures, strict=True):
        chosen = [row for row in rows if row.temperature == temperature][::-1]
        _draw_speeds(speeds, chosen, temperature)
        _draw_phases(phases, [row for row in chosen if row.phase_seconds])
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    save_figure(figure, path)


def _draw_speeds(axes: Axes, rows: Sequence[ComparisonRow], temperature: float) -> None:
    colours = [
        BASELINE if row.mode in ("plain", "generate") else OURS if row.tau else THEIRS
        for row in rows
    ]
    bars = axes.barh([row.mode for row in rows], [r.tokens_per_second for r in rows], color=colours)
    labels = [
        f"{row.speedup:.2f}x" + (f", tau {row.tau:.2f}" if row.draft_cost is not None else "")
        for row in rows
    ]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.margins(x=0.32)  # room for the labels
    axes.set_xlabel(f"tokens per second, temperature {temperature:g}")


def _draw_phases(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    left = [0.0] * len(rows)
    for phase, colour in (
        ("draft", "#e09f3e"), ("verify", OURS), ("accept", "#9e2a2b"), ("commit", "#540b0e"),
    ):  # fmt: skip
        width = [1000 * row.phase_seconds[phase] / max(1, _steps(row)) for row in rows]
        axes.barh([row.mode for row in rows], width, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.set_xlabel("milliseconds of a step")
    axes.legend(fontsize=8)


def _steps(row: ComparisonRow) -> int:
    return sum(row.accept_length_counts.values())


def write_report(
    rows: Sequence[ComparisonRow], notes: Sequence[str], about: dict[str, Any], folder: Path
) -> None:
    """Write JSON, Markdown and picture; `about` says machine, versions, command and settings."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {**about, "rows": [asdict(row) for row in rows], "notes": list(notes)}
    write_text(folder / "comparison.json", json.dumps(content, indent=2) + "\n")
    machine = about["machine"]
    text = [
        f"{machine['processor']}, {machine['threads']} threads, {about['dtype']}, "
        f"{about['prompts']} prompts, up to {about['max_new_tokens']} new tokens, "
        f"{about['rounds']} rounds.",
        f"`{about['command']}`",
        markdown_table(rows),
        *notes,
    ]
    write_text(folder / "comparison.md", "\n\n".join(text) + "\n")
    title = f"{about['target']} on {machine['processor']}, {about['dtype']}"
    draw(rows, title, folder / "comparison.png")
