"""Theory and measurement as tables, and a picture of speedups by the length of chains."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafthead.lab.reports.report import (
    BASELINE,
    Columns,
    Report,
    Table,
    machine_line,
    number,
    table_of,
)
from drafthead.lab.speedup_model import ChainPrediction
from drafthead.lab.theory.acceptance import Share
from drafthead.lab.theory.theory import Theory

PLACE: Columns = {
    "drafter": lambda theory: theory.drafter, "T": lambda theory: f"{theory.temperature:g}",
}  # fmt: skip
SPEEDS: Columns = {
    **PLACE,
    "K": lambda theory: str(theory.prediction.length),
    "c": lambda theory: number(theory.prediction.cost, 3),
    "c^": lambda theory: number(theory.operations_cost, 3),
    "verify": lambda theory: number(theory.step.verify),
    "host": lambda theory: number(theory.step.host),
    "tokens": lambda theory: number(theory.run_length.tokens),
    "tau": lambda theory: number(theory.tau),
    "formula": lambda theory: number(theory.run_length.speedup),
    "measured": lambda theory: number(theory.speedup),
    "operations": lambda theory: number(theory.run_length.operations),
    "best K": lambda t: f"{t.prediction.best_length} ({t.prediction.best_speedup:.2f}x)",
}
NOTICEABLE = 0.1  # a prediction that is further off gets a reason
LEAST = 0.03  # reasons that change the prediction by less are left out
# Of each factor: why a prediction is too high, and why it is too low.
REASONS = {
    "tokens": (
        "steps bring fewer tokens than one alpha for all depths gives",
        "steps bring more tokens than one alpha for all depths gives",
    ),
    "verify": (
        "the pass over a chain takes longer than a plain one",
        "the pass over a chain took less time than a plain one",
    ),
    "host": (
        "the code around the passes takes longer than in a plain step",
        "the code around the passes takes less time than in a plain step",
    ),
}


def theory_report(found: Sequence[Theory], about: Mapping[str, Any]) -> Report:
    """All that was found; `about` holds machine, versions, command and settings."""
    speeds = table_of("a chain of K tokens: theory and measurement", SPEEDS, found)
    notes = [
        prediction_note(
            f"{each.drafter}, T {each.temperature:g}", each.prediction, each.speedup, each.factors
        )
        for each in found
    ]
    rows = [asdict(each) | {"speedup": each.speedup, "factors": each.factors} for each in found]
    intro = (
        f"{about['target']} on {machine_line(about)}, up to {about['max_new_tokens']} new tokens.",
        f"`{about['command']}`",
    )
    return Report(
        [alpha_table(found), depth_table(found), speeds],
        notes,
        {**about, "rows": rows, "notes": notes},
        intro,
        lambda: draw(found, f"{about['target']} on {machine_line(about)}"),
    )


def prediction_note(
    name: str, prediction: ChainPrediction, speedup: float, factors: Mapping[str, float]
) -> str:
    """Return what the formula predicts for a chain, beside what was measured.

    `factors` are those of `deviation_factors`; they give the reason where the two differ much.
    """
    p = prediction
    note = (
        f"{name}: alpha {p.alpha:.2f}, c {p.cost:.3f} per token, K {p.length}; the formula "
        f"predicts {p.speedup:.2f}x (measured {speedup:.2f}x), and {p.best_speedup:.2f}x for its "
        f"best K, {p.best_length}"
    )
    off = p.speedup / speedup - 1
    if abs(off) <= NOTICEABLE:
        return note
    ordered = sorted(factors, key=lambda reason: -abs(math.log(factors[reason])))
    named = [
        f"{REASONS[reason][factors[reason] < 1]} ({100 * (factors[reason] - 1):+.0f} %)"
        for reason in ordered
        if abs(math.log(factors[reason])) > LEAST
    ]
    return f"{note}. The prediction is {100 * off:+.0f} % off: {'; '.join(named)}"


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
    columns = ["drafter", "T", "beta", "beta at steps", *(f"depth {k + 1}" for k in range(deepest))]
    rows = []
    for theory in found:
        depths = [share(depth) if depth.tries else "-" for depth in theory.by_depth]
        cells = [share(theory.chances), number(theory.chances_at_steps), *depths]
        cells += ["-"] * (deepest - len(depths))
        rows.append([theory.drafter, f"{theory.temperature:g}", *cells])
    return Table("alpha computed from distributions, and counted by depth", columns, rows)


def share(found: Share) -> str:
    """A share with its interval."""
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def draw(found: Sequence[Theory], title: str) -> Figure:
    """Expected speedups against K, with the measured points; an axis for each temperature."""
    temperatures = list(dict.fromkeys(theory.temperature for theory in found))
    size = 6 * len(temperatures), 4.5
    figure, all_axes = plt.subplots(1, len(temperatures), figsize=size, squeeze=False, sharey=True)
    for axes, temperature in zip(all_axes[0], temperatures, strict=True):
        _draw_temperature(axes, [t for t in found if t.temperature == temperature])
        axes.set_title(f"temperature {temperature:g}", fontsize=10)
    all_axes[0, 0].set_ylabel("speedup over plain decoding")
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_temperature(axes: Axes, found: Sequence[Theory]) -> None:
    """Of each drafter the formula, and the measured point."""
    for number_, theory in enumerate(found):
        colour = f"C{number_}"
        lengths = [row.length for row in theory.lengths]
        formula = [row.speedup for row in theory.lengths]
        axes.plot(lengths, formula, color=colour, label=theory.drafter)
        axes.plot(theory.prediction.length, theory.speedup, "o", color=colour)
    axes.axhline(1, color=BASELINE, lw=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("K; line: the formula, point: measured")
    axes.legend(fontsize=8)
