"""A comparison: tables, notes, and a picture of speeds over `model.generate`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafthead.infer.verifiers import VERIFIERS
from drafthead.lab.races.comparison import ComparisonRow
from drafthead.lab.races.divergence import Divergence
from drafthead.lab.races.race import GENERATE, PLAIN, THEIR_RULE
from drafthead.lab.reports.report import (
    BASELINE,
    OURS,
    THEIRS,
    Columns,
    Report,
    Table,
    machine_line,
    number,
    table_of,
)

LISTED_DIVERGENCES = 10
NAMES = {PLAIN: "plain decoding", GENERATE: "model.generate"}  # the baselines, in the picture
EXPLAINED = (
    "nodes: size of the draft trees that were chosen on this machine; speedup: relative to plain "
    "decoding with drafthead, with its interval over prompts; over generate: relative to "
    "model.generate; tau: tokens per pass; c: cost of drafting in a step, in plain steps; bound: "
    "speedup that tau and the measured times allow; efficiency: speedup / tau; repeated: 8-grams "
    "that occur again in an answer, where drafts are easy"
)
WHO: Columns = {"mode": lambda row: row.mode, "T": lambda row: f"{row.temperature:g}"}
COLUMNS: Columns = {
    **WHO,
    "nodes": lambda row: number(row.tree_nodes or None, 1),
    "tokens/s": lambda row: number(row.tokens_per_second, 1),
    "speedup": lambda row: with_range(row),
    "over generate": lambda row: number(row.speedup_hf),
    "tau": lambda row: number(row.tau),
    "c": lambda row: number(row.draft_cost),
    "bound": lambda row: number(row.speedup_bound),
    "efficiency": lambda row: number(row.efficiency),
    "repeated": lambda row: f"{100 * row.repeated_8gram_share:.0f} %",
}


def with_range(row: ComparisonRow) -> str:
    """The speedup with its interval over prompts, or else its extremes over rounds."""
    low, high = row.speedup_interval or row.speedup_range
    return number(row.speedup) + (f" ({low:.2f} to {high:.2f})" if low < high else "")


def fastest(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Our fastest way of decoding, and after it those that are as fast as far as prompts tell.

    These are of its temperature: another one writes other answers.
    """
    ours = sorted((row for row in rows if row.tau is not None), key=lambda row: -row.speedup_hf)
    ours = [row for row in ours if row.temperature == ours[0].temperature]
    return [row for row in ours if row is ours[0] or are_equal(row, ours[0])]


def are_equal(one: ComparisonRow, other: ComparisonRow) -> bool:
    """Whether each speedup lies within the other's interval; plain decoding has none."""
    pairs = [(one.speedup_interval, other.speedup), (other.speedup_interval, one.speedup)]
    within = [interval[0] <= speed <= interval[1] for interval, speed in pairs if interval]
    return bool(within) and all(within)


def noise_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return how far off the speeds are, by those who drafted nothing: they are plain decoding."""
    return [
        f"{row.mode} drafted nothing at temperature {row.temperature:g} and has {row.speedup:.2f} "
        "times the speed of plain decoding, which is the same: differences of that size are noise"
        for row in rows
        if row.mode != PLAIN and row.tree_nodes == 1
    ]


def headline(rows: Sequence[ComparisonRow], prompts: int, spoken: Callable[[str], str]) -> str:
    """Say which of our ways of decoding is fastest, by the first of equally fast `rows`.

    `spoken` has words for a mode. "" without any row.
    """
    if not rows:
        return ""
    best, rule = rows[0], VERIFIERS.get(rows[0].verifier)
    lossy = "" if rule is None or rule.lossless else f" (lossy: {best.verifier})"
    *others, last = [spoken(row.mode) for row in rows]
    names = f"{', '.join(others)} and {last}" if others else last
    found = "are equally fast here" if others else "is fastest"
    alone = f" and {with_range(best)} times plain decoding" if best.mode != PLAIN else ""
    return (
        f"{names} {found} ({prompts} prompts): "
        f"{best.tokens_per_second:.0f} tokens/s at temperature {best.temperature:g}{lossy}, "
        f"{best.speedup_hf:.2f} times model.generate{alone}"
    )


def named(mode: str) -> str:
    """A mode as tables and pictures name it."""
    return NAMES.get(mode, mode)


def race_table(rows: Sequence[ComparisonRow]) -> Table:
    """Every way of decoding."""
    return table_of("", COLUMNS, rows)


def category_tables(rows: Sequence[ComparisonRow]) -> list[Table]:
    """Tables by category of prompts; none where prompts have none."""
    shown = [row for row in rows if row.categories]
    names = sorted({name for row in shown for name in row.categories})
    if len(names) < 2:
        return []

    def table(figure: str) -> Table:
        cells = {
            name: lambda row, name=name: number(getattr(row.categories[name], figure))
            for name in names
        }
        return table_of(f"{figure} by category", {**WHO, **cells}, shown)

    return [table("speedup"), table("tau")]


def divergence_notes(
    divergences: Sequence[Divergence], rows: Sequence[ComparisonRow], prompts: int
) -> list[str]:
    """Sentences about greedy answers that differ from plain decoding's, theirs apart from ours."""
    greedy = [row for row in rows if row.temperature == 0]
    theirs = {row.mode for row in greedy if row.verifier == THEIR_RULE}
    ours = sorted((d for d in divergences if d.mode not in theirs), key=lambda d: -d.top2_gap)
    answers = (len(greedy) - len(theirs) - 1) * prompts  # plain decoding's own are not counted
    notes = [f"greedy answers: all {answers} equal plain decoding"]
    if ours:
        notes = [
            f"greedy answers: {len(ours)} of {answers} differ from plain decoding; first "
            "differences:"
        ]
    notes += [
        f"- {d.mode}, prompt {d.prompt}, token {d.position}: {d.token} instead of {d.plain_token}, "
        f"top-2 logit gap {d.top2_gap:.4f}"
        for d in ours[:LISTED_DIVERGENCES]
    ]
    count = len(divergences) - len(ours)
    total = len(theirs) * prompts
    return [
        *notes,
        f"transformers' own: {count} of {total} differ, because its kernels round differently",
    ]


def comparison_report(
    rows: Sequence[ComparisonRow], notes: Sequence[str], about: dict[str, Any]
) -> Report:
    """The report of a race; `about` holds machine, versions, command and settings."""
    batch = about["batch_size"]
    intro = (
        f"{machine_line(about)}, up to {about['max_new_tokens']} new tokens, "
        f"{about['rounds']} rounds" + (f", {batch} at a time." if batch > 1 else "."),
        f"`{about['command']}`",
    )
    return Report(
        [*category_tables(rows), race_table(rows)],
        [EXPLAINED, *notes],
        {**about, "rows": [asdict(row) for row in rows], "notes": list(notes)},
        intro,
        lambda: draw(rows, f"{Path(about['target']).name}\n{machine_line(about)}"),
    )


def draw(rows: Sequence[ComparisonRow], title: str) -> Figure:
    """Return how many times as fast as `model.generate` each way is; one panel per temperature."""
    temperatures = sorted({row.temperature for row in rows})
    height = len(temperatures) + 0.35 * len(rows) + 0.8
    figure, axes = plt.subplots(len(temperatures), 1, figsize=(9, height), squeeze=False)
    for (speeds,), temperature in zip(axes, temperatures, strict=True):
        _draw_speeds(speeds, [r for r in rows if r.temperature == temperature][::-1], temperature)
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_speeds(axes: Axes, rows: Sequence[ComparisonRow], temperature: float) -> None:
    names = [named(row.mode) for row in rows]
    colours = [BASELINE if row.mode in NAMES else OURS if row.tau else THEIRS for row in rows]
    bars = axes.barh(names, [row.speedup_hf for row in rows], color=colours)
    labels = [f"{row.speedup_hf:.2f}  ({row.tokens_per_second:.0f} tokens/s)" for row in rows]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.axvline(1, color=BASELINE, linewidth=1, linestyle=":")
    axes.margins(x=0.3)  # room for the labels
    axes.set_xlabel(f"times as fast as transformers' model.generate, temperature {temperature:g}")
