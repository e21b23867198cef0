"""Figures of distilled answers: how long they are, and how they ended."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drafthead.train.data.answer_tokens import IDS_COLUMN

REASONS_COLUMN = "finish_reasons"  # of the answers of a row, in order
FROM_TEXT_COLUMN = "ids_from_text"  # True where ids are those of a server's text


@dataclass
class AnswerStatistics:
    """Counts over the rows of a file."""

    rows: int = 0
    lengths: list[int] = field(default_factory=list)  # tokens of each answer, its end included
    # Answers by their FinishReason; those of older versions, which do not give it, are not counted.
    ended: Counter[str] = field(default_factory=Counter)
    from_text: int = 0  # rows whose ids were made of a server's text

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a row of a distilled file."""
        self.rows += 1
        self.lengths += [len(answer["answer"]) for answer in row.get(IDS_COLUMN, ())]
        self.ended.update(row.get(REASONS_COLUMN, ()))
        self.from_text += row.get(FROM_TEXT_COLUMN, False)

    def include(self, others: "AnswerStatistics") -> None:
        """Count the rows of another file too."""
        self.rows += others.rows
        self.lengths += others.lengths
        self.ended.update(others.ended)
        self.from_text += others.from_text
