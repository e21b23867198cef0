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
from typing import IO, Any

from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_json
from drafthead.train.jobs.console import AnswerBar
from drafthead.train.jobs.outputs import (
    REMEDY,
    full_disk_named,
    lock_path,
    manifest_path,
    only_writer,
    other_settings,
)
from drafthead.train.prompts.message_filter import MessageFilter
from drafthead.train.prompts.message_source import Message, MessageSource
from drafthead.train.settings import InventSettings

logger = logging.getLogger(__name__)

FRUITLESS_BATCHES = 20  # without a message to keep, until a run gives up


class TooFewMessagesError(UserError):
    """The target does not write enough messages, or not in time."""


@dataclass
class Progress:
    """How far a file has come after whole batches."""

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
    after the first pass, which may compile, the number is not there.
    """
    with full_disk_named(output), only_writer(lock_path(output), output):
        return _invent(source, output, number, overwrite, seconds)


def _invent(
    source: MessageSource, output: Path, number: int, overwrite: bool, seconds: float | None
) -> InventReport:
    """`invent` in the only process that writes the file."""
    progress = begin(output, source.settings, overwrite)
    texts = texts_written(output)
    if len(texts) >= number:
        return InventReport(len(texts), {}, 0, 0.0)
    with (
        output.open("r+b") as file,
        AnswerBar(number, progress.kept, "invent", "prompt") as bar,
    ):
        inventor = Inventor(source, number, progress, texts[: progress.kept], bar, seconds)
        file.truncate(progress.size)
        file.seek(progress.size)
        while progress.kept < number:
            inventor.write_batch(file)
            if progress.kept < number:  # else the last batch may have been used in part
                save_progress(output, source.settings, progress)
    return InventReport(progress.kept, progress.dropped, bar.tokens, bar.seconds)


class Inventor:
    """Draws batches, keeps what is worth it, and counts."""

    def __init__(
        self,
        source: MessageSource,
        number: int,
        progress: Progress,
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

    def write_batch(self, file: IO[bytes]) -> None:
        """Draw the next batch and write what is kept; raises TooFewMessagesError as `invent`."""
        drawn = self.source.batch(self.progress.batches, self._count)
        kept = 0
        for message in drawn:
            if self.progress.kept + kept == self.number:
                break
            if problem := problem_of(message) or self.filter.problem(message.text):
                self.progress.dropped[problem] = self.progress.dropped.get(problem, 0) + 1
                continue
            file.write(row_of(message, self.source.settings))
            kept += 1
        file.flush()
        self.bar.count(0, kept)
        self.progress.batches += 1
        self.progress.kept += kept
        self.progress.size = file.tell()
        self.fruitless = 0 if kept else self.fruitless + 1
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


def problem_of(message: Message) -> str | None:
    """Say why a message is dropped whatever its words are."""
    if not message.finished:
        return "no end within the limit"
    return "control tokens inside" if message.has_control_token else None


def row_of(message: Message, settings: InventSettings) -> bytes:
    """One line of the file."""
    identity = {"id": f"invented-{settings.seed}-{message.number}"}
    user = {"role": "user", "content": message.text}
    if settings.system is None:
        row: dict[str, Any] = identity | {"prompt": message.text}
    else:
        row = identity | {"messages": [{"role": "system", "content": settings.system}, user]}
    return (json.dumps(row, ensure_ascii=False) + "\n").encode()


def texts_written(output: Path) -> list[str]:
    """The messages of a file's whole lines."""
    lines = output.read_bytes().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [row["prompt"] if "prompt" in row else row["messages"][-1]["content"] for row in rows]


def begin(output: Path, settings: InventSettings, overwrite: bool) -> Progress:
    """The progress of a file; an empty file and a record if there is none.

    Raises UserError if the file belongs to a run with other settings or to no run.
    """
    if overwrite or not output.exists():
        progress = Progress()
        output.unlink(missing_ok=True)
        save_progress(output, settings, progress)  # first: a file without one cannot be continued
        output.touch()
        return progress
    return check_settings(output, settings)


def check_settings(output: Path, settings: InventSettings) -> Progress:
    """The recorded progress of a file; UserError if it was started with other settings."""
    try:
        record = json.loads(manifest_path(output).read_text(encoding="utf-8"))
        progress = Progress(**record["progress"])
        recorded = record["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{output} exists without a readable {manifest_path(output).name}, so it cannot be "
            f"continued: {REMEDY}"
        ) from error
    for key, value in asdict(settings).items():
        if recorded.get(key) != value:
            raise other_settings(output, key, recorded.get(key), value)
    if output.stat().st_size < progress.size:
        raise UserError(f"{output} has lost rows since it was written: {REMEDY}")
    return progress


def save_progress(output: Path, settings: InventSettings, progress: Progress) -> None:
    """Write the record beside a file; a kill leaves the old one or the new one."""
    record = {"settings": asdict(settings), "progress": asdict(progress)}
    write_json(manifest_path(output), record)


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
