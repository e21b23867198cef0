"""The output file of a distillation: whose rows it holds, and which of them are there already.

A row's number `batch` is shared by all rows that were generated together, and they are written
together. What a killed run left of a batch is dropped, so that the batches of the run that
continues, and with them the roundings of every row, are those of a run that was never killed.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafthead.heads.errors import UserError
from drafthead.heads.storage.files import write_text
from drafthead.train.distillation.manifest import (
    REMEDY,
    first_difference,
    lock_path,
    manifest_path,
    read_manifest,
)
from drafthead.train.distillation.settings import DistillSettings
from drafthead.train.distillation.shards import Shard
from drafthead.train.distillation.written import Written, read_written
from drafthead.train.jobs.locks import only_writer

logger = logging.getLogger(__name__)


class DistilledFile:
    """The output of one distillation, or of one shard, which one process at a time may write."""

    def __init__(
        self,
        path: Path,
        settings: DistillSettings,
        overwrite: bool = False,
        shard: Shard | None = None,
    ):
        """Nothing is read before `check` or the `with` block, nothing written before `start`."""
        self.path, self.settings, self.overwrite, self.shard = path, settings, overwrite, shard
        self.manifest: dict[str, Any] = {}
        self.written = Written()  # see `resume`
        self._open = ExitStack()

    def check(self) -> None:
        """Raise UserError if the file belongs to a run with other settings or to no run."""
        if self.overwrite or not self._begun():
            return
        recorded = read_manifest(self.path)
        if difference := first_difference(recorded, asdict(self.settings)):
            key, before, now = difference
            raise UserError(
                f"{self.path} was begun with {key} {before!r}, now {now!r}: give the same "
                "settings, another --output, or --overwrite to start again"
            )
        shard = None if self.shard is None else str(self.shard)
        if recorded.get("shard") != shard:
            raise UserError(
                f"{self.path} was begun as shard {recorded.get('shard')}, now {shard}: {REMEDY}"
            )
        self.manifest = recorded

    def agree(self, name: str, value: object, what: str) -> None:
        """Raise UserError, with `what` in words, if the file was begun with another value.

        A new file records it.
        """
        if self.manifest.setdefault(name, value) != value:
            raise UserError(f"{what} are no longer those that {self.path} was begun with: {REMEDY}")
        self._save_manifest()

    def _save_manifest(self) -> None:
        text = json.dumps(self.manifest, indent=2, ensure_ascii=False)
        write_text(manifest_path(self.path), text + "\n")

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
        if self.shard is not None:
            self.manifest["shard"] = str(self.shard)
        self._save_manifest()
        if self.shard is not None:
            self.path.touch()  # a shard without a row is not one that is missing

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
