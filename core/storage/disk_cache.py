"""The user's folder for what later runs on this machine can reuse.

It only saves time: where it cannot be read or written, work goes on without it, and one sentence
says so.
"""

import logging
import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from drafthead.core.errors import UserError, reason_of
from drafthead.core.storage.files import write_text

logger = logging.getLogger(__name__)


def cache_folder(name: str) -> Path:
    """The folder for one kind of files, which need not exist."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(chosen) if chosen else Path.home() / ".cache"
    except RuntimeError:  # this user has no home
        base = Path(os.devnull)  # in which nothing can be written
    return base / "drafthead" / name


def read_cached(path: Path) -> str | None:
    """The text of a file in the cache; None where there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def write_cached(path: Path, text: str) -> None:
    """Write a file in the cache if that is possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except (OSError, UserError) as error:
        log_unusable(path.parent, reason_of(error.__cause__ or error))


def usable_cache_folder(name: str) -> Path | None:
    """`cache_folder`, made if need be; None where nothing can be written."""
    folder = cache_folder(name)
    reason = reason_against(folder)
    if reason is None:
        return folder
    log_unusable(folder, reason)
    return None


def cache_or_scratch(name: str) -> Path:
    """`usable_cache_folder`, or a folder for this process alone where there is none."""
    return usable_cache_folder(name) or Path(scratch_folder(name).name)


@cache
def scratch_folder(name: str) -> TemporaryDirectory[str]:
    """A folder that is removed when the process ends."""
    return TemporaryDirectory(prefix=f"drafthead-{name}-")


def reason_against(folder: Path) -> str | None:
    """The reason that a folder, made if need be, cannot be written to; None where it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return reason_of(error)


@cache
def log_unusable(folder: Path, reason: str) -> None:
    """Log, once a process, that a folder of the cache is left out."""
    logger.warning(
        "cannot write the cache %s (%s): slow work is repeated in each run",
        folder,
        reason,
    )
