"""A file of prompts that a target invented: what is kept, and continuing after a kill.

Messages are drawn in batches of a fixed size. A file records how long it was after the last whole
batch; what a killed run wrote after that is cut off and drawn again, so the file becomes the same
as an uninterrupted run's.
"""

import json
import logging
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafthead.core.errors import UserError
from drafthead.core.storage.row_file import RowFile
from drafthead.train.jobs.console import AnswerBar
from drafthead.train.jobs.outputs import REMEDY, ResumableRows, full_disk_named, no_manifest
from drafthead.train.prompts.message_filter import MessageFilter
from drafthead.train.prompts.message_source import InventedMessage, MessageSource
from drafthead.train.settings import InventSettings

logger = logging.getLogger(__name__)

FRUITLESS_BATCHES = 20  # without a message to keep, until a run gives up


class TooFewMessagesError(UserError):
    """The target does not write enough messages, or not in time."""


@dataclass
class InventProgress:
    """The counts of a file after whole batches."""

    batches: int = 0
    size: int = 0  # bytes
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # messages by reason


@dataclass(frozen=True)
class InventReport:
    """The report of a run: what the file holds, and what this run did."""

    kept: int
    # Messages by reason, those of earlier runs included; empty when there was nothing to do.
    dropped: dict[str, int]
    tokens: int  # drawn by this run
    seconds: float


def invent(
    source: MessageSource,
    output: Path,
    number: int,
    overwrite: bool = False,
    seconds: float | None = None,
) -> InventReport:
    """Write `number` messages as JSON rows that `drafthead data distill` takes as prompts.

    A file that was started with the same settings is continued, also to a larger number. Raises
    UserError for other settings, when another process writes the file, and when the disk is full;
    TooFewMessagesError when many batches bring nothing that can be kept, and when so many seconds
    after the first pass, which may record, the number is not there.
    """
    with full_disk_named(output), ResumableRows(output, source.settings, overwrite) as rows:
        rows.start()
        progress, texts = progress_of(rows), texts_of(rows.file)
        if len(texts) >= number:
            return InventReport(len(texts), {}, 0, 0.0)
        rows.file.cut(progress.size)
        with AnswerBar(number, progress.kept, "invent", "prompt", "tokens") as bar:
            inventor = Inventor(source, number, progress, texts[: progress.kept], bar, seconds)
            while progress.kept < number:
                inventor.write_batch(rows.file)
                if progress.kept < number:  # else the last batch may have been used in part
                    rows.manifest["progress"] = asdict(progress)
                    rows.save()
        return InventReport(progress.kept, progress.dropped, bar.tokens, bar.seconds)


class Inventor:
    """Draws batches, keeps what is worth it, and counts."""

    def __init__(
        self,
        source: MessageSource,
        number: int,
        progress: InventProgress,
        kept: list[str],
        bar: AnswerBar,
        seconds: float | None = None,
    ):
        """`kept`: the texts of earlier batches, which later ones must not repeat."""
        self.seconds, self.began = seconds, 0.0  # since the first pass
        self.source, self.number, self.progress, self.bar = source, number, progress, bar
        self.filter = MessageFilter()
        for text in kept:
            self.filter.problem(text)
        self.fruitless = 0  # batches in a row

    def write_batch(self, file: RowFile) -> None:
        """Draw the next batch and write what is kept; raises TooFewMessagesError as `invent`."""
        drawn = self.source.batch(self.progress.batches, self._count)
        rows: list[bytes] = []
        for message in drawn:
            if self.progress.kept + len(rows) == self.number:
                break
            if problem := problem_of(message) or self.filter.problem(message.text):
                self.progress.dropped[problem] = self.progress.dropped.get(problem, 0) + 1
                continue
            rows.append(row_of(message, self.source.settings))
        self.progress.size = file.append(b"".join(rows))
        self.progress.batches += 1
        self.progress.kept += len(rows)
        self.bar.count(0, len(rows))
        self.fruitless = 0 if rows else self.fruitless + 1
        if self.fruitless == FRUITLESS_BATCHES:
            raise self._too_few(f"nothing new in {FRUITLESS_BATCHES} batches")

    def _count(self, tokens: int) -> None:
        """Count the tokens of a pass."""
        self.bar.count(tokens, 0)
        self.began = self.began or time.monotonic()
        if self.seconds is not None and time.monotonic() - self.began > self.seconds:
            raise self._too_few(f"too little in {self.seconds:.0f} seconds")

    def _too_few(self, brought: str) -> TooFewMessagesError:
        """Return what the target has brought, and why its messages were dropped."""
        progress = self.progress
        dropped = max(progress.dropped, key=progress.dropped.__getitem__, default="")
        reason = f" (most often dropped: {dropped})" if dropped else ""
        return TooFewMessagesError(
            f"{self.source.settings.target} brought {brought}: {progress.kept} of {self.number} "
            f"messages are there{reason}"
        )


def problem_of(message: InventedMessage) -> str | None:
    """Say why a message is dropped whatever its words are."""
    if not message.finished:
        return "no end within the limit"
    return "control tokens inside" if message.has_control_token else None


def row_of(message: InventedMessage, settings: InventSettings) -> bytes:
    """One line of the file."""
    identity = {"id": f"invented-{settings.seed}-{message.number}"}
    user = {"role": "user", "content": message.text}
    if settings.system is None:
        row: dict[str, Any] = identity | {"prompt": message.text}
    else:
        row = identity | {"messages": [{"role": "system", "content": settings.system}, user]}
    return (json.dumps(row, ensure_ascii=False) + "\n").encode()


def texts_of(file: RowFile) -> list[str]:
    """The messages of a file's whole rows."""
    rows = map(json.loads, file.rows())
    return [row["prompt"] if "prompt" in row else row["messages"][-1]["content"] for row in rows]


def progress_of(rows: ResumableRows) -> InventProgress:
    """The recorded progress of a file; UserError where it cannot be read, or rows are lost."""
    try:
        progress = InventProgress(**rows.manifest.get("progress", {}))
    except TypeError as error:
        raise no_manifest(rows.path) from error
    if rows.file.size < progress.size:
        raise UserError(f"{rows.path} has lost rows since it was written: {REMEDY}")
    return progress


def log_report(report: InventReport, output: Path) -> None:
    """Log how many messages were kept and dropped, and why."""
    if not report.tokens:
        logger.info("%s: %d prompts were there already", output, report.kept)
        return
    speed = report.tokens / report.seconds
    logger.info("%s: %d prompts; %.0f tokens/s drawn", output, report.kept, speed)
    drawn = report.kept + sum(report.dropped.values())
    logger.info("kept %.1f %% of %d messages", 100 * report.kept / drawn, drawn)
    for reason, count in sorted(report.dropped.items(), key=lambda item: -item[1]):
        logger.info("dropped %.1f %%: %s", 100 * count / drawn, reason)
