"""Figures of distilled answers as a table in the terminal."""

from collections.abc import Sequence

import numpy as np

from drafthead.lab.reports.report import Table, print_table
from drafthead.train.distillation.distilled_file import AnswerStatistics

NAMED = 10  # ids that a note gives; the others are only counted
WORDS = {
    "end_token": "ended by their end token",
    "length": "cut at the limit (raise --max-new-tokens)",
    "stopping_criteria": "ended where they repeat themselves",
}


def some(ids: Sequence[str]) -> str:
    """The first ids of several."""
    return ", ".join(ids[:NAMED]) + (", ..." if len(ids) > NAMED else "")


def print_answers(
    statistics: AnswerStatistics, title: str, dropped: int, notes: Sequence[str]
) -> None:
    """Print how long the answers of a file are and how they ended, and notes below."""
    lengths = statistics.lengths
    rows = [("rows", f"{statistics.rows:,}"), ("answers", f"{len(lengths):,}")]
    if lengths:
        middle, long = np.percentile(lengths, [50, 95])
        rows += [
            ("tokens", f"{sum(lengths):,}"),
            ("tokens an answer: median, 95 %, most", f"{middle:.0f}, {long:.0f}, {max(lengths)}"),
        ]
    for reason, words in WORDS.items():
        if count := statistics.ended[reason]:
            rows.append((f"answers {words}", f"{count:,} ({count / len(lengths):.1%})"))
    if statistics.from_text:
        rows.append(("rows whose ids were made of a server's text", f"{statistics.from_text:,}"))
    if dropped:
        rows.append(("rows left out, as an answer was cut", f"{dropped:,}"))
    print_table(Table(title, ("of the file", ""), rows), notes)
