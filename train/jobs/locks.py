"""One writer at a time: a second process that would write the same output is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from drafthead.heads.errors import UserError


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
