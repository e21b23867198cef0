"""Outputs of long jobs: one writer at a time, and a full disk is reported in one sentence."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from drafthead.core.errors import UserError

REMEDY = "choose another --output, or --overwrite to start again"


def manifest_path(output: Path) -> Path:
    """The JSON file beside the output that records the settings."""
    # Not *.json: a folder of outputs can be read as training data.
    return output.with_name(output.name + ".manifest")


def read_manifest(output: Path) -> dict[str, Any]:
    """The manifest of an output.

    Raises UserError, with what can be done, if there is none, or none that can be read.
    """
    manifest = manifest_path(output)
    if not manifest.exists():
        raise UserError(
            f"{output} exists without {manifest.name}, so its settings are unknown: {REMEDY}"
        )
    try:
        recorded = json.loads(manifest.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{manifest} is not valid JSON ({error.msg}): {REMEDY}") from error
    if not isinstance(recorded, dict):
        raise UserError(f"{manifest} is not the manifest of a distillation: {REMEDY}")
    return recorded


def lock_path(output: Path) -> Path:
    """The file that the only writer of an output holds."""
    return output.with_name(f".{output.name}.lock")


def other_settings(output: Path, name: str, before: object, now: object) -> UserError:
    """The error of an output that was started with another value of a setting."""
    return UserError(
        f"{output} was started with {name} {before!r}, now {now!r}: use the same settings, {REMEDY}"
    )


@contextmanager
def only_writer(lock: Path, output: Path) -> Iterator[None]:
    """Hold the file `lock` while `output` is written; it is free again when the process ends.

    Raises UserError when another process holds it.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"another process is writing {output}: wait for its end, or choose another output"
        ) from error
    try:
        yield
    finally:
        held.release()


NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
LEFT_ON_A_FULL_DISK = 2**20  # bytes


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Raise UserError instead of whatever is raised in the block because `path`'s disk is full."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not _is_full(error, path):
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
