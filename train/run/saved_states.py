"""The states that a run is resumed from: written whole, and checked before they are read."""

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from drafthead.heads.errors import UserError
from drafthead.heads.storage.files import write_text

logger = logging.getLogger(__name__)

KEPT_STATES = 2
PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0  # optimiser steps done
    seconds: float = 0.0  # of training, evaluating and saving
    supervised_tokens: int = 0


@dataclass(frozen=True)
class Sources:
    """Hashes of what a run learns from; a run that goes on must have the same."""

    data: str  # see `PackedData.fingerprint`
    target: str  # see `weights_fingerprint`


class SavedStates:
    """The folder `state/` of a run. Every process may read it, only the main process writes."""

    def __init__(self, path: Path):
        self.path = path

    def newest_first(self) -> list[Path]:
        """All states, the one with the most steps first."""
        return sorted(self.path.glob("step-*"), reverse=True)

    def newest_whole(self) -> Path:
        """The newest state whose files are as they were written; others are named in the log.

        Raises UserError when there is none.
        """
        for state in self.newest_first():
            problem = damage(state)
            if problem is None:
                return state
            logger.warning("%s is damaged (%s): an older state is taken", state, problem)
        raise UserError(
            f"no state in {self.path} is whole: restore one, or start again with "
            "train.overwrite=true"
        )

    @property
    def temporary(self) -> Path:
        """Where a state is written before it is complete."""
        return self.path / "unfinished"

    def discard_temporary(self) -> None:
        """Remove what a killed run may have left incomplete."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def keep(self, progress: Progress, sources: Sources) -> None:
        """Make the temporary state the newest one, in one rename, and drop the oldest."""
        values = {**vars(progress), **vars(sources), "files": file_hashes(self.temporary)}
        write_text(self.temporary / PROGRESS_FILE, json.dumps(values) + "\n")
        final = self.path / f"step-{progress.step:09d}"
        shutil.rmtree(final, ignore_errors=True)
        self.temporary.rename(final)
        self.drop_old(KEPT_STATES)

    def drop_old(self, kept: int) -> None:
        """Remove all states but the newest `kept` ones."""
        for old in self.newest_first()[kept:]:
            shutil.rmtree(old)


def file_hashes(folder: Path) -> dict[str, str]:
    """A hash of every file in a folder, by its path within the folder."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != PROGRESS_FILE:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            hashes[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return hashes


def damage(state: Path) -> str | None:
    """What is wrong with the files of a state; None if nothing is."""
    try:
        recorded = json.loads((state / PROGRESS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{PROGRESS_FILE} cannot be read"
    found = file_hashes(state)
    for name, value in recorded.get("files", {}).items():
        if found.get(name) != value:
            return f"{name} is not what was written"
    return None


def read_progress(state: Path, sources: Sources) -> Progress:
    """The progress of a saved state; raises UserError when it was trained on other sources."""
    values = json.loads((state / PROGRESS_FILE).read_text(encoding="utf-8"))
    names = {"data": "the training data is", "target": "the weights of the target are"}
    for name, words in names.items():
        if values.pop(name, getattr(sources, name)) != getattr(sources, name):
            raise UserError(
                f"{words} no longer what {state} was trained with: restore them, choose another "
                "train.output, or start again with train.overwrite=true"
            )
    values.pop("files", None)
    return Progress(**values)
