"""Reads conversations from JSON lines, JSON, Parquet, folders and `datasets` names."""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow
from datasets import DatasetDict, load_from_disk
from pyarrow import parquet

from drafthead.heads.errors import UserError
from drafthead.train.data.answer_tokens import WEIGHTS_COLUMN, StoredTokens, stored_tokens
from drafthead.train.data.hub_data import HubData

logger = logging.getLogger(__name__)

# `role`, `content`, and other keys that the template reads. `finished: False` on an assistant
# message means that it was cut before its end-of-turn, which is then not supervised.
Message = dict[str, Any]

MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
TURN_COLUMN = "turns"
PROMPT_COLUMNS = ("prompt", "question", "instruction", "text")
ANSWER_COLUMNS = ("answer", "response", "output", "completion")
ID_COLUMNS = ("id", "question_id", "conversation_id", "prompt_id")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}
SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Writer:
    """The model that wrote a row's answers, as the row says it."""

    name: str
    weights: str | None  # its `weights_fingerprint`


@dataclass(frozen=True)
class Conversation:
    """Messages in order, an id that is unique in its source, and its place: "FILE:line"."""

    id: str
    messages: list[Message]
    source: str
    tokens: StoredTokens | None = None  # the answers as they were generated, if the row has them
    writer: Writer | None = None  # of the answers, if the row says it
    category: str | None = None  # what kind of request it is, if the row says it

    @property
    def where(self) -> str:
        """The place in words, for error messages: "row 17 of FILE"."""
        file, _, row = self.source.rpartition(":")
        return f"row {row} of {file}"


@dataclass(frozen=True)
class _Row:
    """One row of a source, and its place."""

    file: str
    number: int  # from 1
    unit: Literal["line", "row"]
    values: dict[str, Any]

    @property
    def place(self) -> str:
        """Where the row is, for error messages."""
        return f"{self.file}, {self.unit} {self.number}"


def read_conversations(
    source: str | Path, prompt_column: str | None = None, limit: int | None = None
) -> list[Conversation]:
    """The conversations of `iter_conversations` as a list."""
    return list(iter_conversations(source, prompt_column, limit))


def iter_conversations(
    source: str | Path, prompt_column: str | None = None, limit: int | None = None
) -> Iterator[Conversation]:
    """The first `limit` conversations of a source, in its order, one at a time.

    source: a .jsonl, .json or .parquet file, a folder of them, a folder written by
        `Dataset.save_to_disk`, or a hub data set as NAME, NAME:SPLIT or NAME:CONFIG:SPLIT.
    prompt_column: the column that holds the user's text; it goes before all other columns.

    A row is read as `messages` (role/content or ShareGPT from/value), `turns` (user texts), or a
    prompt with or without an answer. Ids that repeat get a suffix: "a", "a#2". Rows without
    messages are skipped with a warning. Raises UserError that names file and line.
    """
    if limit is not None and limit < 1:
        raise UserError(f"the limit of rows to read must be at least 1, got {limit}")
    count = 0
    taken: set[str] = set()
    empty: list[str] = []
    for row in _rows(str(source)):
        messages = _row_messages(row, prompt_column)
        if not messages:
            empty.append(row.place)
            continue
        name, tokens = _unique(_row_id(row), taken), stored_tokens(row.values, row.place)
        place, writer = f"{row.file}:{row.number}", _row_writer(row.values)
        category = row.values.get("category")
        kind = category if isinstance(category, str) else None
        yield Conversation(name, messages, place, tokens, writer, kind)
        count += 1
        if count == limit:
            break
    if not count:
        raise UserError(f"{source} holds no conversation: add rows or use another source")
    if empty:
        logger.warning("%d rows without messages skipped, the first is %s", len(empty), empty[0])


def source_digest(source: str) -> str:
    """What a source holds: a hash of the content of files, or the revision of a hub data set.

    Raises UserError as `iter_conversations` does.
    """
    path = Path(source).expanduser()
    if not path.exists():
        return HubData.named(source).digest if _may_be_hub(source) else source
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as content:
                digest.update(f"{file.relative_to(path)} ".encode(errors="surrogatepass"))
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _row_id(row: _Row) -> str:
    for column in ID_COLUMNS:
        if row.values.get(column) not in (None, ""):
            return str(row.values[column])
    return f"{Path(row.file).name}:{row.number}"


def _row_writer(values: dict[str, Any]) -> Writer | None:
    """Who answered a row of `drafthead distill`; other data has columns `target` of other kinds."""
    name, weights = values.get("target"), values.get(WEIGHTS_COLUMN)
    if not isinstance(name, str) or "finished" not in values:
        return None
    return Writer(name, weights if isinstance(weights, str) else None)


def _unique(name: str, taken: set[str]) -> str:
    candidate, copies = name, 1
    while candidate in taken:
        copies += 1
        candidate = f"{name}#{copies}"
    taken.add(candidate)
    return candidate


def _rows(source: str) -> Iterator[_Row]:
    """Rows of a file, a folder or a hub data set."""
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _folder_rows(path)
    elif path.exists():
        yield from _file_rows(path)
    elif not _may_be_hub(source):
        raise UserError(f"{source} does not exist: check the path")
    else:
        yield from _hub_rows(source)


def _may_be_hub(source: str) -> bool:
    """Whether a source that is no path can be the name of a data set."""
    return Path(source).suffix not in SUFFIXES and not source.startswith((".", "/", "~"))


def _folder_rows(folder: Path) -> Iterator[_Row]:
    if (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists():
        yield from _saved_rows(folder)
        return
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if not files:
        raise UserError(f"folder {folder} holds no {', '.join(SUFFIXES)} file")
    for file in files:
        yield from _file_rows(file)


def _saved_rows(folder: Path) -> Iterator[_Row]:
    data = load_from_disk(folder)
    if isinstance(data, DatasetDict):
        if "train" not in data:
            raise UserError(f"{folder} has no split `train`: use one of {_listed(data, '/')}")
        data = data["train"]
    for number, values in enumerate(data, start=1):
        yield _Row(str(folder), number, "row", values)


def _hub_rows(source: str) -> Iterator[_Row]:
    for number, values in enumerate(HubData.named(source).rows(), start=1):
        yield _Row(source, number, "row", values)


def _file_rows(path: Path) -> Iterator[_Row]:
    readers = {".jsonl": _json_line_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise UserError(f"{path}: only {', '.join(SUFFIXES)} files are read; convert it to one")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty: write at least one row to it")
    try:
        yield from readers[path.suffix](path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): convert it") from error


def _json_line_rows(path: Path) -> Iterator[_Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno})"
                ) from error
            yield _object_row(path, number, "line", values)


def _json_rows(path: Path) -> Iterator[_Row]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines in a file named .json
            yield from _json_line_rows(path)
            return
        raise UserError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from error
    for number, values in enumerate(data if isinstance(data, list) else [data], start=1):
        yield _object_row(path, number, "row", values)


def _parquet_rows(path: Path) -> Iterator[_Row]:
    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for values in batch.to_pylist():
                number += 1
                yield _Row(str(path), number, "row", values)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is not a readable Parquet file ({error})") from error


def _object_row(path: Path, number: int, unit: Literal["line", "row"], values: Any) -> _Row:
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise UserError(f"{path}, {unit} {number}: expected a JSON object, found {kind}")
    return _Row(str(path), number, unit, values)


def _listed(names: Iterable[str], prefix: str = "") -> str:
    return ", ".join(f"`{prefix}{name}`" for name in names)


def _row_messages(row: _Row, prompt_column: str | None) -> list[Message]:
    """The messages of a row of any known form."""
    values = row.values
    if prompt_column is not None:
        if values.get(prompt_column) is None:
            raise UserError(f"{row.place}: no column `{prompt_column}`, but {_listed(values)}")
        return _prompt_messages(row, prompt_column)
    for column in MESSAGE_COLUMNS:
        if isinstance(values.get(column), list):
            return _listed_messages(row, column)
    if isinstance(values.get(TURN_COLUMN), list):
        return [_message(row, {"role": "user", "content": text}) for text in values[TURN_COLUMN]]
    for column in PROMPT_COLUMNS:
        if values.get(column) is not None:
            return _prompt_messages(row, column)
    raise UserError(
        f"{row.place}: no column that holds a conversation in {_listed(values)}; known columns are "
        f"{_listed((*MESSAGE_COLUMNS, TURN_COLUMN, *PROMPT_COLUMNS))}; "
        "use --prompt-column for a prompt column of another name"
    )


def _prompt_messages(row: _Row, column: str) -> list[Message]:
    """A prompt, its `input` (Alpaca) if there is one, and its answer."""
    values = row.values
    if isinstance(values[column], list):  # prompt and completion as lists of messages
        messages = _listed_messages(row, column)
    else:
        messages = [_message(row, {"role": "user", "content": values[column]})]
        if column == "instruction" and isinstance(values.get("input"), str) and values["input"]:
            messages[0]["content"] += f"\n\n{values['input']}"
    for answer in ANSWER_COLUMNS:
        if answer == column or not values.get(answer):
            continue
        if isinstance(values[answer], str):
            return [*messages, {"role": "assistant", "content": values[answer]}]
        if isinstance(values[answer], list) and isinstance(values[answer][0], dict):
            return messages + _listed_messages(row, answer)
    return messages


def _listed_messages(row: _Row, column: str) -> list[Message]:
    return [_message(row, raw) for raw in row.values[column]]


def _message(row: _Row, raw: Any) -> Message:
    """One message as role and content; other keys are left for the template."""
    if not isinstance(raw, dict):
        raise UserError(f"{row.place}: a message must be an object, found {raw!r:.60}")
    if "from" in raw and "value" in raw:
        role, content = SHAREGPT_ROLES.get(str(raw["from"]).lower()), raw["value"]
        if role is None:
            known = _listed(SHAREGPT_ROLES)
            raise UserError(f"{row.place}: unknown role `{raw['from']}`; known are {known}")
        return {"role": role, "content": _text(row, content)}
    if not isinstance(raw.get("role"), str):
        raise UserError(
            f"{row.place}: a message needs `role` and `content`, or `from` and `value`; "
            f"it has {_listed(raw)}"
        )
    content = raw.get("content")
    if content is None and raw.get("tool_calls"):
        content = ""
    others = {k: v for k, v in raw.items() if v is not None and k not in ("role", "content")}
    return {"role": raw["role"], "content": _text(row, content), **others}


def _text(row: _Row, content: Any) -> str:
    """Content as text; a list of text parts is joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and "text" in p for p in content):
        return "".join(part["text"] for part in content)
    raise UserError(f"{row.place}: the content of a message must be text, found {content!r:.60}")
