"""What a file of distilled rows holds in complete batches, and where in it each of them is."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafthead.heads.errors import UserError
from drafthead.train.distillation.answer_statistics import AnswerStatistics


@dataclass
class Written:
    """The rows of complete batches, counted."""

    questions: dict[str, str | None] = field(default_factory=dict)  # `question_of` by id
    batches: dict[int, tuple[int, int]] = field(default_factory=dict)  # where each is, in bytes
    dropped: dict[str, str] = field(default_factory=dict)  # ids without a row: cut answers
    statistics: AnswerStatistics = field(default_factory=AnswerStatistics)
    end: int = 0  # of the last complete batch, in bytes

    def add(self, number: int, rows: Sequence[Mapping[str, Any]], end: int) -> None:
        """Count a batch that lies between the end of the one before and `end`."""
        self.batches[number] = (self.end, end)
        self.end = end
        for row in rows:
            self.questions[row["id"]] = row.get("question")  # None: of an older version
            self.statistics.add(row)


def read_written(path: Path, manifest: Mapping[str, Any]) -> Written:
    """What the file holds; nothing where there is no file.

    A batch that lacks rows counts as complete if others follow it: a user has taken the rows out.
    Raises UserError for that in a shard, and for what is no row, with its line.
    """
    written = Written()
    batch: list[dict[str, Any]] = []
    number = before = 0  # of the batch; of the rows read, in bytes
    for row, after in _rows(path):
        if batch and row.get("batch", 0) != number:
            _refuse_hole(path, manifest, number)
            written.add(number, batch, before)
            batch = []
        number = row.get("batch", 0)
        batch.append(row)
        if len(batch) >= row.get("batch_rows", 1):
            written.add(number, batch, after)
            batch = []
        before = after
    _read_dropped(written, manifest)
    return written


def _refuse_hole(path: Path, manifest: Mapping[str, Any], number: int) -> None:
    """Raise UserError for a shard that has lost rows: what is answered again is another batch."""
    if manifest.get("shard") is not None:
        raise UserError(
            f"{path} has lost rows of its batch {number}, so it cannot be joined with the other "
            "shards: distil this shard again with --overwrite"
        )


def _read_dropped(written: Written, manifest: Mapping[str, Any]) -> None:
    """Add what was dropped of complete batches, also of those of which no row is left."""
    for number, dropped in manifest.get("dropped", {}).items():
        if int(number) in written.batches or not dropped["rows"]:
            written.batches.setdefault(int(number), (written.end, written.end))
            written.dropped |= dropped["questions"]


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The rows that end with a line break, each with its end in bytes."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                row = json.loads(line)
                row["id"], row["messages"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{path}, line {number}: not a row of a distillation ({error}); "
                    "use --overwrite to start again"
                ) from error
            yield row, end
