"""Figures of distilled answers as a table in the terminal."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from drafthead.lab.reports.report import Table, print_table
from drafthead.train.distillation.answers import DistillReport
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


def answer_rows(statistics: AnswerStatistics, dropped: int) -> list[tuple[str, str]]:
    """How long the answers of a file are, and how they ended."""
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
    return rows


def print_report(report: DistillReport, path: Path) -> None:
    """Print what was written, figures of all answers in the file, and what was left out."""
    speed = report.tokens / report.seconds if report.seconds else 0.0
    notes = [
        f"{report.written:,} rows written, {report.already_done:,} were there before; "
        f"{report.tokens:,} tokens at {speed:,.0f} tokens/s"
    ]
    if report.too_long:
        notes.append(
            f"{len(report.too_long):,} prompts longer than the context were skipped: "
            f"{some(report.too_long)}"
        )
    if report.shortened:
        notes.append(
            f"{len(report.shortened):,} conversations lost later turns that did not fit into the "
            f"context, or that the chat template refused: {some(report.shortened)}"
        )
    rows = answer_rows(report.statistics, report.dropped)
    print_table(Table(str(path), ("of the file", ""), rows), notes)
