"""A learning curve: tau against the answers that a head has learnt from, and what more bring.

The points are of one run (`train.curve`): the head after 1/8, 1/4, 1/2 and all of the answers were
read once. They cost an evaluation each, where heads trained on parts of the answers would cost as
much as the run again. The learning rate has not fallen at these points, so all of them lie below
what a run on so many answers ends with; the curve is used for what a doubling brings alone, from
the best tau of the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from drafthead.core.storage.files import json_lines
from drafthead.train.run.folder import BEST_BY, EVALUATION_FILE

FEWEST, LAST = 3, 3  # points of a curve; points that say what a doubling brings
# Twice the answers bring what a doubling brought before, or so much less or more. Chosen from six
# forecasts on a small model, of which it holds five (tests/lab/test_learning_curve.py prints them):
# heads of few steps learn in bursts.
SPREAD = 2.5
NAMED = 8  # categories in a sentence


class Point(NamedTuple):
    """Tau, with trees of BEST_BY nodes, after so many answers."""

    answers: int
    tau: float


class Forecast(NamedTuple):
    """Tau after more answers, with an interval that held five of six such forecasts."""

    answers: int
    low: float
    tau: float
    high: float


@dataclass(frozen=True)
class LearningCurve:
    """The points of a run's first epoch, the tau at its end, and its best."""

    points: Sequence[Point]
    final: float
    best: float
    best_epoch: float

    @classmethod
    def of_run(cls, folder: Path, category: str | None = None) -> "LearningCurve | None":
        """The curve of a run's folder, of all answers or of a category; None without enough points.

        Answers are all that were read, whatever the category.
        """
        found = [e for e in json_lines(folder / EVALUATION_FILE) if "answers" in e]
        taus = [
            each["tau_tree"][str(BEST_BY)] if category is None else each["categories"][category]
            for each in found
        ]
        points: dict[int, Point] = {}
        for each, tau in zip(found, taus, strict=True):  # later ones read the same answers again
            points.setdefault(each["answers"], Point(each["answers"], tau))
        if len(points) < FEWEST:
            return None
        place = int(np.argmax(taus))
        return cls(list(points.values()), taus[-1], taus[place], found[place]["epochs"])

    @property
    def answers(self) -> int:
        """All that the run has read."""
        return self.points[-1].answers

    def forecast(self, times: float) -> Forecast:
        """Tau with so many times the answers, if doublings go on to bring what they have brought.

        Points 1.6, 1.8 and 2.0 after 200, 400 and 800 answers, and 2.2 at the end: 2.4 with 1,600.
        """
        counts, taus = zip(*self.points[-LAST:], strict=True)
        doubling = max(0.0, float(np.polyfit(np.log2(counts), taus, 1)[0]))
        gain = doubling * float(np.log2(times))
        low, high = self.best + gain / SPREAD, self.best + gain * SPREAD
        return Forecast(round(times * self.answers), low, self.best + gain, high)

    def sentences(self, seconds_an_answer: float | None = None) -> list[str]:
        """The sentences of `what_more_would_bring` about all answers."""
        points = ", ".join(f"{p.tau:.2f} after {p.answers:,}" for p in self.points)
        twice = self.forecast(2)
        more = twice.answers - self.answers
        taken = ""
        if seconds_an_answer is not None:
            taken = f", {in_words(more * seconds_an_answer)} here"
        found = [
            f"tau at {BEST_BY} nodes by answers read: {points}; {self.final:.2f} at the end",
            f"{more:,} more answers: tau {self.best:.2f} -> {twice.tau:.2f} "
            f"({twice.low:.2f} to {twice.high:.2f}){taken}",
        ]
        if self.best > 1.01 * self.final:
            found.append(
                f"trained too long: tau was {self.best:.2f} after {self.best_epoch:.1f} epochs, "
                f"and that head is the one to take; more answers help, more epochs do not"
            )
        return found


def what_more_would_bring(folder: Path, seconds_an_answer: float | None = None) -> list[str]:
    """Sentences on a run: what twice the answers would bring, and if training was too long.

    None of it without a curve. By category, too, where rows have one: what gains most is first, and
    what to ask next. `seconds_an_answer` is what another answer takes here, to write and to learn.
    """
    curve = LearningCurve.of_run(folder)
    if curve is None:
        return []
    *_, last = json_lines(folder / EVALUATION_FILE)
    forecasts = []
    for name in last.get("categories", ()):
        of_kind = LearningCurve.of_run(folder, name)
        if of_kind is not None:
            forecasts.append((name, of_kind.best, of_kind.forecast(2)))
    forecasts.sort(key=lambda each: each[1] - each[2].tau)
    kinds = [
        f"{name} {before:.2f} -> {after.tau:.2f} ({after.low:.2f} to {after.high:.2f})"
        for name, before, after in forecasts[:NAMED]
    ]
    found = curve.sentences(seconds_an_answer)
    return [*found, f"with twice the answers, by category: {', '.join(kinds)}"] if kinds else found


def in_words(seconds: float) -> str:
    """A duration: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
