"""A file of rows that outlives its writers: several processes append to it, or one alone."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any

from drafthead.core.errors import UserError, reason_of
from drafthead.core.storage.files import plain_path


def hold(file: IO[Any], output: Path) -> None:
    """Keep other writers of an output out until this file is closed, or this process has ended.

    Raises UserError when another process holds the file.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UserError(
            f"another process is writing {output}: wait for its end, or choose another output"
        ) from error


class RowFile:
    """A file with a row on each line, each of which is there whole or not at all.

    What a kill has left of a row is cut off when the next one is written, and what a full disk
    leaves of one at once. Nothing is kept back in memory. All that fails is a UserError.
    """

    def __init__(
        self, path: Path, begins: bytes = b'{"id": "', *, alone: bool = False, private: bool = False
    ):
        """Opens the file, which is made if need be; `begins` is how each row does.

        No other process may have it `alone`. A `private` one only its owner may read from the first
        change on, whatever was there. Raises UserError where it cannot be written, or is a folder,
        a device, or a pipe.
        """
        self.path, self.begins, self.alone, self.private = plain_path(path), begins, alone, private
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
        with self._as_user_errors():
            self.file = os.fdopen(os.open(path, flags, 0o600 if private else 0o666), "r+b", 0)
        try:
            if alone:
                hold(self.file, path)
        except UserError:
            self.close()
            raise

    @property
    def size(self) -> int:
        """The number of bytes."""
        return os.fstat(self.file.fileno()).st_size

    def rows(self) -> Iterator[bytes]:
        """The whole rows, each with the end of its line."""
        with self.path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))

    def append(self, rows: bytes, most: int | None = None) -> int:
        """Write whole rows, and return the size of the file.

        Raises UserError where there is no place for all of them: on the disk, or among the `most`
        bytes of the file. The file is as before then.
        """
        with self._turn():
            end = self._whole()
            if most is not None and end + len(rows) > most:
                raise UserError(f"{self.path} has its {most >> 20} MiB")
            try:
                written = 0
                while written < len(rows):
                    written += self.file.write(rows[written:])
            except OSError:
                self.file.truncate(end)
                raise
            return end + len(rows)

    def cut(self, size: int | None = None) -> None:
        """Keep so many bytes, or without a size all whole rows."""
        with self._turn():
            self.file.truncate(self._whole() if size is None else size)

    def close(self) -> None:
        """Let others have the file."""
        with suppress(OSError):
            self.file.close()

    def _whole(self) -> int:
        """Cut off a part of a row at the end; returns the size. UserError for what is no row."""
        size = self.size
        if not size or os.pread(self.file.fileno(), 1, size - 1) == b"\n":
            return size
        with mmap(self.file.fileno(), 0, access=ACCESS_READ) as lines:
            end = lines.rfind(b"\n") + 1
            part = lines[end : end + len(self.begins)]
            if not self.begins.startswith(part) and (part.strip(b"\0") or not end):
                raise UserError(f"{self.path} does not end with a row: choose another file")
        self.file.truncate(end)
        return end

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Others wait meanwhile."""
        with self._as_user_errors():
            if not self.alone:
                fcntl.flock(self.file, fcntl.LOCK_EX)
            try:
                if self.private:
                    os.fchmod(self.file.fileno(), 0o600)
                yield
            finally:
                if not self.alone:
                    fcntl.flock(self.file, fcntl.LOCK_UN)

    @contextmanager
    def _as_user_errors(self) -> Iterator[None]:
        """Raise UserError for what the system refuses."""
        try:
            yield
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path} cannot be written: {reason_of(error)}") from error
