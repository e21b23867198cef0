"""The plan of `plan-tree`: a table, a JSON file and a picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from drafthead.heads.storage.files import write_text
from drafthead.lab.profiling.plan_table import PlanRow
from drafthead.lab.reports.figures import BASELINE, OURS, save_figure
from drafthead.lab.reports.tables import print_table

COLUMNS = ("nodes", "depth", "step ms", "tokens a step", "tokens/s", "speedup", "choice")


def print_plan(rows: Sequence[PlanRow], notes: Sequence[str], title: str) -> None:
    """Show the plan in the terminal."""
    print_table(title, COLUMNS, [cells(row) for row in rows], notes)


def cells(row: PlanRow) -> list[str]:
    """One size as text."""
    return [
        str(row.nodes),
        str(row.depth),
        f"{1000 * row.step_seconds:.2f}",
        f"{row.tokens:.2f}",
        f"{row.tokens_per_second:.1f}",
        f"{row.speedup:.2f}",
        ("none: plain decoding" if row.depth == 0 else "<--") if row.chosen else "",
    ]


def write_plan(rows: Sequence[PlanRow], why: str, about: dict[str, Any], output: Path) -> None:
    """Write the plan as JSON, and tokens/s against nodes as a picture next to it."""
    chosen = next(row for row in rows if row.chosen)
    choice = {"nodes": chosen.nodes, "depth": chosen.depth} if chosen.depth else None
    content = {**about, "choice": choice, "reason": why, "sizes": [asdict(row) for row in rows]}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, json.dumps(content, indent=2) + "\n")
    picture = output.with_suffix(".png")
    draw(rows, f"{about['head']} on {about['target']}, {about['dtype']}", picture)
    print(f"written: {output}, {picture.name}")


def draw(rows: Sequence[PlanRow], title: str, path: Path) -> None:
    """Expected tokens/s against nodes, the choice marked, plain decoding as a line."""
    plain = rows[0]
    chosen = next(row for row in rows if row.chosen)
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot([r.nodes for r in rows], [r.tokens_per_second for r in rows], "o-", color=OURS)
    axes.plot(chosen.nodes, chosen.tokens_per_second, "o", ms=12, mfc="none", color=OURS)
    label = f"{chosen.nodes} nodes, {chosen.speedup:.2f}x" if chosen.depth else "plain decoding"
    point = (chosen.nodes, chosen.tokens_per_second)
    axes.annotate(label, point, (0, 9), textcoords="offset points", ha="center", fontsize=9)
    axes.axhline(plain.tokens_per_second, ls="--", color=BASELINE, lw=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([r.nodes for r in rows], [str(r.nodes) for r in rows])
    axes.minorticks_off()
    axes.set_ylim(0, 1.15 * max(r.tokens_per_second for r in rows))
    axes.set_xlabel("nodes of the tree (1: plain decoding)")
    axes.set_ylabel("expected tokens/s per row")
    axes.set_title(title, fontsize=9)
    figure.tight_layout()
    save_figure(figure, path)
