"""The plan of `explain tree`: what each size of tree costs and brings, and which is chosen."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from drafthead.lab.profiling.plan_table import PlanRow
from drafthead.lab.reports.report import BASELINE, OURS, Columns, Report, table_of

PLAN_COLUMNS: Columns = {
    "nodes": lambda row: str(row.nodes),
    "depth": lambda row: str(row.depth),
    "step ms": lambda row: f"{1000 * row.step_seconds:.2f}",
    "tokens a step": lambda row: f"{row.tokens:.2f}",
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "speedup": lambda row: f"{row.speedup:.2f}",
    "choice": lambda row: "" if not row.chosen else "<--" if row.depth else "none: plain decoding",
}


def plan_report(rows: Sequence[PlanRow], notes: Sequence[str], about: dict[str, Any]) -> Report:
    """The plan of a head; the first note is the reason of the choice."""
    chosen = next(row for row in rows if row.chosen)
    choice = {"nodes": chosen.nodes, "depth": chosen.depth} if chosen.depth else None
    sizes = [asdict(row) for row in rows]
    return Report(
        [table_of(f"{about['head']} on {about['target']}", PLAN_COLUMNS, rows)],
        notes,
        {**about, "choice": choice, "reason": notes[0], "sizes": sizes},
        draw=lambda: draw_plan(rows, f"{about['head']} on {about['target']}, {about['dtype']}"),
    )


def draw_plan(rows: Sequence[PlanRow], title: str) -> Figure:
    """Expected tokens/s against nodes, the choice marked, plain decoding as a line."""
    plain = rows[0]
    chosen = next(row for row in rows if row.chosen)
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot([r.nodes for r in rows], [r.tokens_per_second for r in rows], "o", ms=4, color=OURS)
    best: dict[int, float] = {}  # of each number of nodes, over its depths
    for row in rows:
        best[row.nodes] = max(row.tokens_per_second, best.get(row.nodes, 0.0))
    counts = sorted(best)
    axes.plot(counts, [best[nodes] for nodes in counts], color=OURS)
    axes.plot(chosen.nodes, chosen.tokens_per_second, "o", ms=12, mfc="none", color=OURS)
    label = f"{chosen.nodes} nodes, {chosen.speedup:.2f}x" if chosen.depth else "plain decoding"
    point = (chosen.nodes, chosen.tokens_per_second)
    axes.annotate(label, point, (0, 9), textcoords="offset points", ha="center", fontsize=9)
    axes.axhline(plain.tokens_per_second, ls="--", color=BASELINE, lw=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(nodes) for nodes in counts])
    axes.minorticks_off()
    axes.set_ylim(0, 1.15 * max(r.tokens_per_second for r in rows))
    axes.set_xlabel("nodes of the tree (1: plain decoding)")
    axes.set_ylabel("expected tokens/s per row")
    axes.set_title(title, fontsize=9)
    return figure
