"""Writing files and folders atomically, and reading nothing but files and folders."""

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from drafthead.core.errors import UserError, reason_of


def plain_path(path: Path, below: Sequence[Path] | None = None) -> Path:
    """The path of a file, of a folder of files, or of nothing yet; none of them is opened.

    Raises UserError for a device, a pipe or a socket, also within the folder, which may have no
    end, and where it is not `below` one of some folders.
    """
    name = str(path)[:200]
    try:
        if "\0" in name:
            raise ValueError("a path has no zero byte")
        if below is not None:
            place = path.resolve()
            if not any(place.is_relative_to(folder.resolve()) for folder in below):
                raise UserError(f"{name} is in none of the folders that are allowed")
        within = [*path.glob("*"), *path.glob("*/*")] if path.is_dir() else []
        for each in (path, *within):
            if each.exists() and not (each.is_file() or each.is_dir()):
                raise UserError(f"{str(each)[:200]} is neither a file nor a folder")
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read: {reason_of(error)}") from error
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end and is removed after an error.

    So a crash leaves the old file or the new one, never half of it. Of several writers at once the
    last one wins.
    """
    # Another name for each writer, or they would rename each other's files. Not from `tempfile`,
    # whose files no other user may read.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    plain_path(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file as `replacing` does; raises OSError, and leaves nothing behind then."""
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as file:
        file.write(text)


def write_json(path: Path, content: Any) -> None:
    """Write JSON that people can read, as `write_text` does."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def json_lines(path: Path) -> Iterator[Any]:
    """The records of a file's lines, up to one that a stop has cut off; none without a file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n"):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def let_others_read(path: Path) -> None:
    """Give a file the permissions of any new file: safetensors writes for the owner alone."""
    probe = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    path.chmod(mode)


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `folder` at the end, or removed after an error.

    Raises UserError when `folder` is a file or is not empty.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder} exists and is not a folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose another --output")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes it readable for its owner only
        temporary.replace(folder)
    finally:
        rmtree(temporary, ignore_errors=True)
