"""Rows of JSON lines, JSON, Parquet, folders and `datasets` names, one at a time."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow
from datasets import DatasetBuilder, DatasetDict, load_dataset_builder, load_from_disk
from huggingface_hub.errors import HTTPError
from pyarrow import parquet

from drafthead.core.errors import UserError, first_line
from drafthead.core.storage.files import plain_path
from drafthead.train.data.left_out import UnusableRowError

SUFFIXES = (".jsonl", ".json", ".parquet")
SPLITS, SAVED = "dataset_dict.json", ("dataset_info.json", "state.json")  # of `save_to_disk`
OTHERS = (*SAVED, "dataset_infos.json")  # no rows, whoever has written them
CARD, CONFIGURATIONS = "README.md", "configs:"  # of the hub, which names files for splits


@dataclass(frozen=True)
class SourceRow:
    """One row of a source, and its place."""

    file: str
    number: int  # from 1
    unit: Literal["line", "row"]
    content: Any  # what was read, or why nothing can be read, as an UnusableRowError
    # Arrow gives all rows the same fields, and fills those that a row lacks with nulls.
    from_arrow: bool = False

    @property
    def place(self) -> str:
        """Return where the row is, for error messages."""
        return f"{self.file}, {self.unit} {self.number}"

    @property
    def values(self) -> dict[str, Any]:
        """The row by column; UnusableRowError where it is none."""
        if isinstance(self.content, UnusableRowError):
            raise self.content
        if not isinstance(self.content, dict):
            kind = type(self.content).__name__
            raise UnusableRowError(f"{self.place}: expected a JSON object, found {kind}")
        return self.content


def rows_of(source: str) -> Iterator[SourceRow]:
    """Rows of a file, of a folder or of a hub data set.

    Raises UserError for a source that cannot be read; a row that cannot be is given as such.
    """
    path = plain_path(Path(source).expanduser())
    if path.is_dir():
        yield from _folder_rows(path)
    elif path.exists():
        yield from _file_rows(path)
    elif not _may_be_hub(source):
        raise UserError(f"{source} does not exist: check the path")
    else:
        yield from _arrow_rows(source, HubData.named(source).rows())


def source_digest(source: str) -> str:
    """A digest of a source: a hash of the content of files, or the revision of a hub data set.

    Raises UserError as `rows_of` does.
    """
    path = plain_path(Path(source).expanduser())
    if not path.exists():
        if not _may_be_hub(source):
            return source
        hub = HubData.named(source)  # of which no row is read
        return f"{hub.builder.cache_dir}:{hub.split}"
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as content:
                digest.update(f"{os.path.relpath(file, path)} ".encode(errors="surrogatepass"))
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _may_be_hub(source: str) -> bool:
    """Tell whether a source that is no path can be the name of a data set."""
    return Path(source).suffix not in SUFFIXES and not source.startswith((".", "/", "~"))


def _folder_rows(folder: Path) -> Iterator[SourceRow]:
    if (folder / SPLITS).exists() or all((folder / name).exists() for name in SAVED):
        yield from _saved_rows(folder)
        return
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if (other := _read_otherwise(folder)) is not None:
        rows = [str(file) for file in files if file.name not in OTHERS]
        such = f", such as {rows[0]}" if rows else ""
        raise UserError(
            f"{other} says that other tools read this folder otherwise: name a file of rows{such}"
        )
    if not files:
        raise UserError(f"folder {folder} holds no {', '.join(SUFFIXES)} file")
    for file in files:
        yield from _file_rows(file)


def _read_otherwise(folder: Path) -> Path | None:
    """A file by which `datasets` or others read a folder in another way than file by file."""
    card = folder / CARD
    if card.exists():
        header = card.read_text(encoding="utf-8", errors="replace").split("---\n")[1:2]
        if any(line.startswith(CONFIGURATIONS) for line in "".join(header).splitlines()):
            return card
    known = (folder / name for name in OTHERS)
    return next(filter(Path.exists, known), None) or next(folder.glob("*.arrow"), None)


def _saved_rows(folder: Path) -> Iterator[SourceRow]:
    """The rows of a folder of `save_to_disk`; raises UserError where it is not whole."""
    try:
        data = load_from_disk(folder)
    except Exception as error:  # `datasets` and pyarrow raise many kinds
        name = SPLITS if (folder / SPLITS).exists() else SAVED[0]
        raise UserError(
            f"`datasets` cannot load the folder that {folder / name} describes "
            f"({first_line(error)}): name a file of rows"
        ) from error
    if isinstance(data, DatasetDict):
        if "train" not in data:
            splits = ", ".join(f"`/{name}`" for name in data)
            raise UserError(f"{folder} has no split `train`: use one of {splits}")
        data = data["train"]
    yield from _arrow_rows(str(folder), data)


def _arrow_rows(file: str, rows: Iterable[Any]) -> Iterator[SourceRow]:
    for number, values in enumerate(rows, start=1):
        yield SourceRow(file, number, "row", values, from_arrow=True)


def _file_rows(path: Path) -> Iterator[SourceRow]:
    readers = {".jsonl": _json_line_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise UserError(f"{path}: only {', '.join(SUFFIXES)} files are read; convert it to one")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty: write at least one row to it")
    try:
        yield from readers[path.suffix](path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): convert it") from error


def _json_line_rows(path: Path) -> Iterator[SourceRow]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield SourceRow(str(path), number, "line", _parsed(line, f"{path}, line {number}"))


def _parsed(line: str, place: str) -> Any:
    """Return what a line of JSON says, or why it says nothing."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")  # some of Python's messages end so
        return UnusableRowError(f"{place}: not valid JSON ({reason} at column {error.colno})")
    except RecursionError:
        return UnusableRowError(f"{place}: the JSON is nested too deeply")


def _json_rows(path: Path) -> Iterator[SourceRow]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines in a file named .json
            yield from _json_line_rows(path)
            return
        raise UserError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from error
    for number, content in enumerate(data if isinstance(data, list) else [data], start=1):
        yield SourceRow(str(path), number, "row", content)


def _parquet_rows(path: Path) -> Iterator[SourceRow]:
    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=1024)
        yield from _arrow_rows(str(path), (row for batch in batches for row in batch.to_pylist()))
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is not a readable Parquet file ({error})") from error


Values = dict[str, Any]  # of a row, by column


@dataclass(frozen=True)
class HubData:
    """One split of a data set."""

    source: str  # as it was written: NAME, NAME:SPLIT or NAME:CONFIG:SPLIT
    builder: DatasetBuilder
    split: str

    @classmethod
    def named(cls, source: str) -> "HubData":
        """The data set of a name; its rows are not asked for yet.

        Raises UserError where there is none, or no way to it.
        """
        name, *selection = source.split(":")
        split = selection.pop() if selection else "train"
        with _readable(source):
            return cls(source, load_dataset_builder(name, *selection), split)

    def rows(self) -> Iterator[Values]:
        """Its rows in order, from `datasets`' own cache if they were downloaded before.

        Raises UserError where they do not arrive.
        """
        with _readable(self.source):
            is_here = Path(self.builder.cache_dir).exists()
            read = self.builder.as_dataset if is_here else self.builder.as_streaming_dataset
            yield from read(self.split)


@contextmanager
def _readable(source: str) -> Iterator[None]:
    """Errors of the network and of wrong names as one sentence."""
    try:
        yield
    except (OSError, ValueError, HTTPError) as error:
        reason = first_line(error)
        raise UserError(
            f"{source} is neither a file nor a data set that can be loaded ({reason}); "
            "data sets are written NAME, NAME:SPLIT or NAME:CONFIG:SPLIT"
        ) from error
