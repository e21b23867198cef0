"""Theory and measurement as tables, and as `theory.json`, `theory.md` and `theory.png`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from drafthead.heads.storage.files import write_text
from drafthead.lab.reports.figures import BASELINE, save_figure
from drafthead.lab.reports.predictions import prediction_note
from drafthead.lab.reports.tables import markdown_table, number, print_table
from drafthead.lab.theory.acceptance import Share
from drafthead.lab.theory.theory import Theory

# Lines of the table by K, and the fields of `LengthRow` that they show.
QUANTITIES = {
    "tokens": "tokens", "formula": "speedup", "at cost": "speedup_at_cost",
    "operations": "operations",
}  # fmt: skip


class Table(NamedTuple):
    """A table with its title."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def tables(found: Sequence[Theory]) -> list[Table]:
    """Those that the terminal shows, the shortest first."""
    return [alpha_table(found), depth_table(found), speed_table(found)]


def alpha_table(found: Sequence[Theory]) -> Table:
    """alpha of each drafter at each temperature: the form of Leviathan et al.'s Table 3."""
    temperatures = list(dict.fromkeys(theory.temperature for theory in found))
    by_place = {(theory.drafter, theory.temperature): theory for theory in found}
    drafters = list(dict.fromkeys(theory.drafter for theory in found))
    columns = [f"T {temperature:g}" for temperature in temperatures]
    rows = [[name, *(share(by_place[name, t].alpha) for t in temperatures)] for name in drafters]
    return Table("alpha: drafted tokens that are accepted", ["drafter", *columns], rows)


def depth_table(found: Sequence[Theory]) -> Table:
    """alpha by depth as counted, and computed for depth 1."""
    deepest = max(len(theory.by_depth) for theory in found)
    columns = ["drafter", "T", "beta", "beta at steps"]
    rows = [
        [
            *place(theory),
            share(theory.chances),
            number(theory.chances_at_steps),
            *(share(depth) if depth.tries else "-" for depth in theory.by_depth),
            *["-"] * (deepest - len(theory.by_depth)),
        ]
        for theory in found
    ]
    depths = [f"depth {k}" for k in range(1, deepest + 1)]
    return Table("alpha computed from distributions, and counted by depth", columns + depths, rows)


def speed_table(found: Sequence[Theory]) -> Table:
    """Costs, predicted and measured speedup for the chains that were decoded, and the best K."""
    columns = [
        "drafter", "T", "K", "c", "c^", "verify", "host", "tokens", "tau", "formula", "at cost",
        "measured", "operations", "best K", "best K at cost",
    ]  # fmt: skip
    rows = []
    for theory in found:
        prediction = theory.prediction
        row = theory.row(prediction.length)
        best, at_cost = prediction.best_length, theory.best_at_cost
        rows.append(
            [
                *place(theory),
                str(prediction.length),
                number(prediction.cost, 3),
                number(theory.operations_cost, 3),
                number(theory.step.verify),
                number(theory.step.host),
                number(row.tokens),
                number(theory.tau),
                number(row.speedup),
                number(row.speedup_at_cost),
                number(theory.speedup),
                number(row.operations),
                f"{best} ({prediction.best_speedup:.2f}x)",
                f"{at_cost} ({theory.row(at_cost).speedup_at_cost if at_cost else 1:.2f}x)",
            ]
        )
    return Table("a chain of K tokens: theory and measurement", columns, rows)


def length_table(found: Sequence[Theory]) -> Table:
    """What the theory says of every K; a line for each quantity."""
    longest = max(len(theory.lengths) for theory in found)
    rows = [
        [
            *place(theory),
            name,
            *(number(getattr(row, field)) for row in theory.lengths),
            *["-"] * (longest - len(theory.lengths)),
        ]
        for theory in found
        for name, field in QUANTITIES.items()
    ]
    lengths = [str(k) for k in range(1, longest + 1)]
    return Table("theory by K", ["drafter", "T", "K", *lengths], rows)


def place(theory: Theory) -> list[str]:
    """The first two cells of a row."""
    return [theory.drafter, f"{theory.temperature:g}"]


def share(found: Share) -> str:
    """A share with its interval."""
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def notes(found: Sequence[Theory]) -> list[str]:
    """A sentence for each row: prediction and measurement, and why they differ if they do."""
    return [
        prediction_note(
            f"{theory.drafter}, T {theory.temperature:g}",
            theory.prediction,
            theory.speedup,
            theory.factors,
        )
        for theory in found
    ]


def print_theory(found: Sequence[Theory]) -> None:
    """Show tables and sentences in the terminal."""
    *first, last = tables(found)
    for table in first:
        print_table(*table)
    print_table(*last, notes(found))


def write_theory(found: Sequence[Theory], about: Mapping[str, Any], folder: Path) -> None:
    """Write JSON, Markdown and picture; `about` holds machine, versions, command and settings."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        asdict(theory) | {"speedup": theory.speedup, "factors": theory.factors} for theory in found
    ]
    content = {**about, "rows": rows, "notes": notes(found)}
    write_text(folder / "theory.json", json.dumps(content, indent=2) + "\n")
    machine = about["machine"]
    text = [
        f"{about['target']} on {machine['processor']}, {machine['threads']} threads, "
        f"{about['dtype']}, {about['prompts']} prompts, up to {about['max_new_tokens']} new "
        "tokens.",
        f"`{about['command']}`",
        *(
            f"{table.title}:\n\n{markdown_table(table.columns, table.rows)}"
            for table in (*tables(found), length_table(found))
        ),
        *notes(found),
    ]
    write_text(folder / "theory.md", "\n\n".join(text) + "\n")
    draw(found, f"{about['target']} on {machine['processor']}, {about['dtype']}", folder)
    print(f"written: {folder / 'theory.json'}, theory.md, theory.png")


def draw(found: Sequence[Theory], title: str, folder: Path) -> None:
    """Expected speedups against K, with the measured points; an axis for each temperature."""
    temperatures = list(dict.fromkeys(theory.temperature for theory in found))
    size = 6 * len(temperatures), 4.5
    figure, all_axes = plt.subplots(1, len(temperatures), figsize=size, squeeze=False, sharey=True)
    for axes, temperature in zip(all_axes[0], temperatures, strict=True):
        _draw_temperature(axes, [t for t in found if t.temperature == temperature])
        axes.set_title(f"temperature {temperature:g}", fontsize=10)
    all_axes[0, 0].set_ylabel("speedup over plain decoding")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    save_figure(figure, folder / "theory.png")


def _draw_temperature(axes: Axes, found: Sequence[Theory]) -> None:
    """Of each drafter the formula (dashed), the same at measured costs, and the measured point."""
    for number_, theory in enumerate(found):
        colour = f"C{number_}"
        lengths = [row.length for row in theory.lengths]
        axes.plot(lengths, [row.speedup for row in theory.lengths], "--", color=colour, lw=1)
        at_cost = [row.speedup_at_cost for row in theory.lengths]
        axes.plot(lengths, at_cost, color=colour, label=theory.drafter)
        axes.plot(theory.prediction.length, theory.speedup, "o", color=colour)
    axes.axhline(1, color=BASELINE, lw=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("K; dashed: the formula, solid: at measured costs, point: measured")
    axes.legend(fontsize=8)
