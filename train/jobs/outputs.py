"""Outputs of long jobs: one writer at a time, and a full disk is reported in one sentence."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from drafthead.core.errors import UserError
from drafthead.core.storage.files import plain_path, write_json
from drafthead.core.storage.row_file import RowFile, hold

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

REMEDY = "choose another --output, or --overwrite to start again"


def manifest_path(output: Path) -> Path:
    """The JSON file beside the output that records the settings."""
    # Not *.json: a folder of outputs can be read as training data.
    return output.with_name(output.name + ".manifest")


def no_manifest(output: Path) -> UserError:
    """The error of an output whose manifest is not there, or damaged."""
    return UserError(
        f"{output} exists without a readable {manifest_path(output).name}, so it cannot be "
        f"continued: {REMEDY}"
    )


class ResumableRows:
    """A file of rows that one process at a time writes, and the manifest with its settings.

    A run with the same settings continues what an earlier one has begun.
    """

    def __init__(self, path: Path, settings: "DataclassInstance", overwrite: bool = False):
        """Nothing is read before `check` or the `with` block, nothing written before `start`.

        Raises UserError for a path that can be none of a file.
        """
        self.path, self.settings, self.overwrite = plain_path(path), settings, overwrite
        self.manifest: dict[str, Any] = {}

    def check(self) -> None:
        """Read the manifest; UserError if the file is of a run with other settings or of no run."""
        if self.overwrite or not self.is_begun:
            return
        try:
            self.manifest = json.loads(manifest_path(self.path).read_text(encoding="utf-8"))
            recorded = self.manifest["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise no_manifest(self.path) from error
        for name, now in asdict(self.settings).items():
            if (before := recorded.get(name)) != now:
                raise UserError(
                    f"{self.path} was started with {name} {before!r}, now {now!r}: use the same "
                    f"settings, {REMEDY}"
                )

    def __enter__(self) -> Self:
        """Open and lock the file; raises UserError when another process has it, and as `check`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        existed = self.path.exists()
        self.file = RowFile(self.path, alone=True)
        try:
            if not existed and not self.file.size:  # a manifest is then of a file that was removed
                manifest_path(self.path).unlink(missing_ok=True)
            self.check()
        except BaseException:
            self.file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Let others have the file."""
        self.file.close()

    @property
    def is_begun(self) -> bool:
        """Whether a run has begun the file, also without a row."""
        if not self.path.exists():
            return False
        return self.path.stat().st_size > 0 or manifest_path(self.path).exists()

    def start(self) -> None:
        """Begin a file that is new or to be overwritten; nothing is lost before."""
        if self.is_begun and not self.overwrite:
            return
        self.file.cut(0)
        self.manifest = {"settings": asdict(self.settings)}
        self.save()

    def save(self) -> None:
        """Write the manifest; a kill leaves the old one or the new one."""
        write_json(manifest_path(self.path), self.manifest)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if need be; it is free again when the process ends.

    Raises UserError when another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        hold(lock, folder)
        yield


NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
LEFT_ON_A_FULL_DISK = 2**20  # bytes


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Raise UserError instead of whatever is raised in the block because `path`'s disk is full."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError):
            is_full = getattr(error.__cause__, "errno", None) in NO_SPACE
        else:
            is_full = _is_full(error, path)
        if not is_full:
            raise
        raise UserError(
            f"the disk of {path} is full: make room and run the same command again; what was "
            "written completely is kept"
        ) from error


def _is_full(error: BaseException, path: Path) -> bool:
    """Tell whether the error says so, or is one of a library that lost the reason on its way."""
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return True
    # Libraries in Rust quote the system's own sentence; what did not fit may be gone again.
    if any(os.strerror(number) in str(error) for number in NO_SPACE):
        return True
    folder = next((p for p in (path, *path.parents) if p.is_dir()), None)
    return folder is not None and shutil.disk_usage(folder).free < LEFT_ON_A_FULL_DISK
