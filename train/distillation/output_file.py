"""The output file of a distillation: whose rows it holds, and which of them are there already.

A row's number `batch` is shared by all rows that were generated together, and they are written
together. What a killed run left of a batch is dropped, so that the batches of the run that
continues, and with them the roundings of every row, are those of a run that was never killed.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafthead.heads.errors import UserError
from drafthead.heads.files import write_text
from drafthead.train.data.conversations import Message
from drafthead.train.jobs.locks import only_writer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DistillSettings:
    """Everything that decides the content of the rows; a resumed run must have the same."""

    target: str
    prompts: str
    max_new_tokens: int = 256  # for each answer
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    seed: int = 0
    prompt_column: str | None = None
    dtype: str = "auto"
    batch_size: int = 32  # conversations decoded together; 16-bit targets round by batch
    end_repetition: bool = True  # end answers that only repeat themselves: `EndlessRepetition`

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise UserError(f"temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.batch_size < 1:
            raise UserError(f"the batch size must be at least 1, got {self.batch_size}")


def manifest_path(output: Path) -> Path:
    """The JSON file beside the output that records the settings."""
    # Not *.json: a folder of outputs can be read as training data.
    return output.with_name(output.name + ".manifest")


def question_hash(asked: Sequence[Message]) -> str:
    """A hash of all messages that are sent to the target."""
    texts = [(message["role"], message["content"]) for message in asked]
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()


class DistilledFile:
    """The output of one distillation, which one process at a time may write."""

    def __init__(self, path: Path, settings: DistillSettings, overwrite: bool = False):
        """Nothing is read or written before `check` or the `with` block."""
        self.path, self.settings, self.overwrite = path, settings, overwrite
        self._open = ExitStack()
        self._next_batch = 0

    def check(self) -> None:
        """Raise UserError if the file belongs to a run with other settings or to no run."""
        if self.overwrite or not self._begun():
            return
        manifest = manifest_path(self.path)
        if not manifest.exists():
            raise UserError(
                f"{self.path} exists without {manifest.name}, so its settings are unknown: choose "
                "another --output, or --overwrite to start again"
            )
        try:
            recorded = json.loads(manifest.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise UserError(
                f"{manifest} is no valid JSON ({error.msg}): use --overwrite"
            ) from error
        for key, value in asdict(self.settings).items():
            if key in recorded and recorded[key] != value:
                raise UserError(
                    f"{self.path} was begun with {key} {recorded[key]!r}, now {value!r}: give the "
                    "same settings, another --output, or --overwrite to start again"
                )

    def check_weights(self, weights: str) -> None:
        """Raise UserError if the rows there were written by a target with other weights.

        `weights` is its `weights_fingerprint`; a new file records it.
        """
        manifest = manifest_path(self.path)
        recorded = json.loads(manifest.read_text(encoding="utf-8"))
        if recorded.setdefault("weights", weights) != weights:
            raise UserError(
                f"the weights of {self.settings.target} are no longer those that {self.path} was "
                "begun with: choose another --output, or --overwrite to start again"
            )
        write_text(manifest, json.dumps(recorded, indent=2) + "\n")

    def __enter__(self) -> "DistilledFile":
        """Lock the file; raises UserError when another process has it, and as `check`."""
        with ExitStack() as opened:
            lock = self.path.with_name(f".{self.path.name}.lock")
            opened.enter_context(only_writer(lock, self.path))
            self.check()
            if self.overwrite or not self._begun():
                self.path.unlink(missing_ok=True)
                settings = json.dumps(asdict(self.settings), indent=2)
                write_text(manifest_path(self.path), settings + "\n")
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the file."""
        self._open.close()

    def _begun(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def questions(self) -> dict[str, str | None]:
        """The `question_hash` of each row in the file, by id; incomplete batches are cut off.

        None for a row of an older version. Raises UserError that names the line of what is no row.
        """
        written: dict[str, str | None] = {}
        if not self._begun():
            return written
        batch: dict[str, str | None] = {}
        number = end = before = 0  # of the batch; of complete batches and of rows read, in bytes
        for row, after in self._rows():
            if batch and row.get("batch", 0) != number:  # a user took rows of that batch out
                written |= batch
                batch, end, self._next_batch = {}, before, number + 1
            number = row.get("batch", 0)
            batch[row["id"]] = row.get("question")
            if len(batch) >= row.get("batch_rows", 1):
                written |= batch
                batch, end, self._next_batch = {}, after, number + 1
            before = after
        self._cut(end)
        return written

    def _rows(self) -> Iterator[tuple[dict[str, Any], int]]:
        """The rows that end with a line break, each with its end in bytes."""
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                try:
                    row = json.loads(line)
                    row["id"], row["messages"]
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(
                        f"{self.path}, line {number}: not a row of a distillation ({error}); "
                        "use --overwrite to start again"
                    ) from error
                yield row, end

    def _cut(self, end: int) -> None:
        if end < self.path.stat().st_size:
            logger.info("%s: dropped the rows of a batch that is not complete", self.path)
            with self.path.open("r+b") as file:
                file.truncate(end)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the rows of one batch; they are on disk, or in the system's hands, afterwards."""
        mark = {"batch": self._next_batch, "batch_rows": len(rows)}
        lines = [json.dumps({**row, **mark}, ensure_ascii=False) + "\n" for row in rows]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        self._next_batch += 1
