"""The output file of a distillation: whose rows it holds, and which of them are there already.

A row's number `batch` is shared by all rows that were generated together, and they are written
together. What a killed run left of a batch is dropped, so that the batches of the run that
continues, and with them the roundings of every row, are those of a run that was never killed.

Beside the file lies its manifest, a JSON file with the settings.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_json
from drafthead.train.data.conversations import IDS_COLUMN
from drafthead.train.jobs.outputs import (
    REMEDY,
    lock_path,
    manifest_path,
    only_writer,
    other_settings,
    read_manifest,
)
from drafthead.train.settings import DistillSettings

REASONS_COLUMN = "finish_reasons"  # of the answers of a row, in order
FROM_TEXT_COLUMN = "ids_from_text"  # True where ids are those of a server's text


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """The first setting in which two manifests differ, with both values.

    One that a manifest of an older version lacks had its default.
    """
    for item in fields(DistillSettings):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        values = one.get(item.name, default), other.get(item.name, default)
        if values[0] != values[1]:
            return item.name, *values
    return None


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


@dataclass
class Written:
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
            self.questions[row["id"]] = row.get("question")  # None: of an older version
            self.statistics.add(row)


def read_written(path: Path, manifest: Mapping[str, Any]) -> Written:
    """Return what the file holds; nothing where there is no file.

    A batch that lacks rows counts as complete if others follow it: a user has taken the rows out.
    Raises UserError for what is no row, with its line.
    """
    written = Written()
    batch: list[dict[str, Any]] = []
    number = before = 0  # of the batch; of the rows read, in bytes
    for row, after in _rows(path):
        if batch and row.get("batch", 0) != number:
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


def _read_dropped(written: Written, manifest: Mapping[str, Any]) -> None:
    """Add what was dropped of complete batches, also of those of which no row is left."""
    for number, dropped in manifest.get("dropped", {}).items():
        if int(number) in written.batches or not dropped["rows"]:
            written.batches.add(int(number))
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


logger = logging.getLogger(__name__)


class DistilledFile:
    """The output of one distillation, which one process at a time may write."""

    def __init__(self, path: Path, settings: DistillSettings, overwrite: bool = False):
        """Nothing is read before `check` or the `with` block, nothing written before `start`."""
        self.path, self.settings, self.overwrite = path, settings, overwrite
        self.manifest: dict[str, Any] = {}
        self.written = Written()  # see `resume`
        self._open = ExitStack()

    def check(self) -> None:
        """Raise UserError if the file belongs to a run with other settings or to no run."""
        if self.overwrite or not self._begun():
            return
        recorded = read_manifest(self.path)
        if difference := first_difference(recorded, asdict(self.settings)):
            raise other_settings(self.path, *difference)
        self.manifest = recorded

    def agree(self, name: str, value: object, what: str) -> None:
        """Raise UserError, with `what` in words, if the file was started with another value.

        A new file records it.
        """
        if self.manifest.setdefault(name, value) != value:
            raise UserError(
                f"{what} are no longer those that {self.path} was started with: {REMEDY}"
            )
        self._save_manifest()

    def _save_manifest(self) -> None:
        write_json(manifest_path(self.path), self.manifest)

    def __enter__(self) -> "DistilledFile":
        """Lock the file; raises UserError when another process has it, and as `check`."""
        with ExitStack() as opened:
            opened.enter_context(only_writer(lock_path(self.path), self.path))
            self.check()
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the file."""
        self._open.close()

    def _begun(self) -> bool:
        if not self.path.exists():
            return False
        return self.path.stat().st_size > 0 or manifest_path(self.path).exists()

    def start(self) -> None:
        """Begin a file that is new or to be overwritten; nothing is lost before."""
        if self._begun() and not self.overwrite:
            return
        self.path.unlink(missing_ok=True)
        self.manifest = asdict(self.settings)
        self._save_manifest()

    def resume(self) -> None:
        """Note what the file holds; a batch that is not complete is cut off.

        Raises UserError as `read_written`.
        """
        self.written = written = read_written(self.path, self.manifest)
        if self._begun() and written.end < self.path.stat().st_size:
            logger.info("%s: dropped the rows of a batch that is not complete", self.path)
            with self.path.open("r+b") as file:
                file.truncate(written.end)
        recorded = self.manifest.get("dropped", {})
        if incomplete := [number for number in recorded if int(number) not in written.batches]:
            for number in incomplete:
                del recorded[number]
            self._save_manifest()

    def append(
        self, number: int, rows: Sequence[dict[str, Any]], dropped: Mapping[str, str]
    ) -> None:
        """Write the rows of batch `number`; they are on disk, or in the system's hands, afterwards.

        `dropped` are the questions, by id, whose answers are not written.
        """
        if dropped:  # before the rows: with them the batch is complete
            batches = self.manifest.setdefault("dropped", {})
            batches[str(number)] = {"rows": len(rows), "questions": dict(dropped)}
            self._save_manifest()
        mark = {"batch": number, "batch_rows": len(rows)}
        lines = [json.dumps({**row, **mark}, ensure_ascii=False) + "\n" for row in rows]
        content = "".join(lines).encode()
        with self.path.open("ab") as file:
            file.write(content)
        self.written.add(number, rows, self.written.end + len(content))
        self.written.dropped |= dropped
