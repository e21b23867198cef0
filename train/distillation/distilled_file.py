"""The output file of a distillation: whose rows it holds, and which of them are there already.

A row's number `batch` is shared by all rows that were generated together, and they are written
together. What a killed run left of a batch is dropped, so that the batches of the run that
continues, and with them the roundings of every row, are those of a run that was never killed.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafthead.core.errors import UserError
from drafthead.train.data.conversations import IDS_COLUMN
from drafthead.train.jobs.outputs import REMEDY, ResumableRows
from drafthead.train.settings import DistillSettings

REASONS_COLUMN = "finish_reasons"  # of the answers of a row, in order
FROM_TEXT_COLUMN = "ids_from_text"  # True where ids are those of a server's text


@dataclass
class AnswerStatistics:
    """Counts over the rows of a file."""

    rows: int = 0
    lengths: list[int] = field(default_factory=list)  # tokens of each answer, its end included
    ended: Counter[str] = field(default_factory=Counter)  # answers by their FinishReason
    from_text: int = 0  # rows whose ids were made of a server's text

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a row of a distilled file."""
        self.rows += 1
        self.lengths += [len(answer["answer"]) for answer in row.get(IDS_COLUMN, ())]
        self.ended.update(row.get(REASONS_COLUMN, ()))
        self.from_text += row.get(FROM_TEXT_COLUMN, False)


@dataclass
class WrittenRows:
    """The rows of complete batches, counted."""

    questions: dict[str, str | None] = field(default_factory=dict)  # `question_of` by id
    batches: set[int] = field(default_factory=set)  # their numbers
    dropped: dict[str, str] = field(default_factory=dict)  # ids without a row: cut answers
    statistics: AnswerStatistics = field(default_factory=AnswerStatistics)
    end: int = 0  # of the last complete batch, in bytes

    def add(self, number: int, rows: Sequence[Mapping[str, Any]], end: int) -> None:
        """Count a batch that ends at the byte `end`."""
        self.batches.add(number)
        self.end = end
        for row in rows:
            self.questions[row["id"]] = row.get("question")
            self.statistics.add(row)


logger = logging.getLogger(__name__)


class DistilledFile(ResumableRows):
    """The output of one distillation, which one process at a time may write."""

    settings: DistillSettings
    written: WrittenRows  # see `resume`

    def agree(self, name: str, value: object, what: str) -> None:
        """Raise UserError, with `what` in words, if the file was started with another value.

        A new file records it.
        """
        if self.manifest.setdefault(name, value) != value:
            raise UserError(
                f"{what} are no longer those that {self.path} was started with: {REMEDY}"
            )
        self.save()

    def resume(self) -> None:
        """Note what the file holds; a batch that is not complete is cut off.

        A batch that lacks rows counts as complete if others follow it: a user has taken the rows
        out. Raises UserError for what is no row, with its line.
        """
        self.written = written = WrittenRows()
        self._read_batches()
        for number, dropped in self.manifest.get("dropped", {}).items():
            if int(number) in written.batches or not dropped["rows"]:
                written.batches.add(int(number))
                written.dropped |= dropped["questions"]
        if written.end < self.file.size:
            logger.info("%s: dropped the rows of a batch that is not complete", self.path)
            self.file.cut(written.end)
        recorded = self.manifest.get("dropped", {})
        if incomplete := [number for number in recorded if int(number) not in written.batches]:
            for number in incomplete:
                del recorded[number]
            self.save()

    def _read_batches(self) -> None:
        """Count the complete batches of the file."""
        batch: list[dict[str, Any]] = []
        number = before = after = 0  # of the batch; bytes of the rows before this one, and with it
        for index, line in enumerate(self.file.rows(), start=1):
            row = self._row(line, index)
            before, after = after, after + len(line)
            if batch and row.get("batch", 0) != number:
                self.written.add(number, batch, before)
                batch = []
            number = row.get("batch", 0)
            batch.append(row)
            if len(batch) >= row.get("batch_rows", 1):
                self.written.add(number, batch, after)
                batch = []

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        """The row of a line; raises UserError, with the line's number, for what is none."""
        try:
            row: dict[str, Any] = json.loads(line)
            row["id"], row["messages"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path}, line {number}: not a row of a distillation ({error}); "
                "use --overwrite to start again"
            ) from error
        return row

    def append(
        self, number: int, rows: Sequence[dict[str, Any]], dropped: Mapping[str, str]
    ) -> None:
        """Write the rows of batch `number`; they are on disk, or in the system's hands, afterwards.

        `dropped` are the questions, by id, whose answers are not written.
        """
        if dropped:  # before the rows: with them the batch is complete
            batches = self.manifest.setdefault("dropped", {})
            batches[str(number)] = {"rows": len(rows), "questions": dict(dropped)}
            self.save()
        mark = {"batch": number, "batch_rows": len(rows)}
        lines = [json.dumps({**row, **mark}, ensure_ascii=False) + "\n" for row in rows]
        self.written.add(number, rows, self.file.append("".join(lines).encode()))
        self.written.dropped |= dropped
