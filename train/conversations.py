"""Conversations from any source, and the tokens of them that training supervises.

Reading: JSON lines, JSON, Parquet, folders and `datasets` names become `Conversation`s. Marking:
the loss mask of assistant tokens is computed by rendering the tokenizer's chat template with and
without each answer, so that it works for any template, without `{% generation %}` tags.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow
from datasets import DatasetDict, load_dataset, load_from_disk
from jinja2 import TemplateError
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError

logger = logging.getLogger(__name__)

# `role`, `content`, and whatever else the template reads. `finished: False` on an assistant
# message says that it was cut before its end-of-turn, which is then not supervised.
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
class Conversation:
    """Messages in order, an id that is unique within its source, and its place: "FILE:line"."""

    id: str
    messages: list[Message]
    source: str

    @property
    def where(self) -> str:
        """The place in words, for error messages: "row 17 of FILE"."""
        file, _, row = self.source.rpartition(":")
        return f"row {row} of {file}"


@dataclass(frozen=True)
class SupervisedTokens:
    """Token ids [T] of one rendered conversation and which of them are supervised [T]."""

    input_ids: list[int]
    mask: list[bool]


@dataclass(frozen=True)
class SupervisedRows:
    """What is left of a data set after truncation.

    `truncated` counts the rows that were cut, `dropped` names the places of those of them that
    kept no supervised token and were left out of `rows`.
    """

    rows: list[SupervisedTokens]
    truncated: int
    dropped: tuple[str, ...]


# ------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Row:
    file: str
    number: int  # from 1
    unit: Literal["line", "row"]
    values: dict[str, Any]

    @property
    def place(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


def read_conversations(
    source: str | Path, prompt_column: str | None = None, limit: int | None = None
) -> list[Conversation]:
    """The first `limit` conversations of a source, in its order.

    source: a .jsonl, .json or .parquet file, a folder of them, a folder written by
        `Dataset.save_to_disk`, or a hub data set as NAME, NAME:SPLIT or NAME:CONFIG:SPLIT.
    prompt_column: the column that holds the user's text, before any other reading of the row.

    A row is read as `messages` (role/content or ShareGPT from/value), `turns` (user texts), or a
    prompt with or without an answer. Ids that repeat get a suffix: "a", "a#2". Rows without
    messages are skipped with a warning. Raises UserError that names file and line.
    """
    if limit is not None and limit < 1:
        raise UserError(f"the limit of rows to read must be at least 1, got {limit}")
    conversations: list[Conversation] = []
    taken: set[str] = set()
    empty: list[str] = []
    for row in _rows(str(source)):
        messages = _row_messages(row, prompt_column)
        if not messages:
            empty.append(row.place)
            continue
        name = _unique(_row_id(row), taken)
        conversations.append(Conversation(name, messages, f"{row.file}:{row.number}"))
        if len(conversations) == limit:
            break
    if not conversations:
        raise UserError(f"{source} holds no conversation: add rows or point at another source")
    if empty:
        logger.warning("%d rows without messages skipped, the first is %s", len(empty), empty[0])
    return conversations


def _row_id(row: _Row) -> str:
    for column in ID_COLUMNS:
        if row.values.get(column) not in (None, ""):
            return str(row.values[column])
    return f"{Path(row.file).name}:{row.number}"


def _unique(name: str, taken: set[str]) -> str:
    candidate, copies = name, 1
    while candidate in taken:
        copies += 1
        candidate = f"{name}#{copies}"
    taken.add(candidate)
    return candidate


def _rows(source: str) -> Iterator[_Row]:
    """Rows of a file, a folder or a hub data set, each with its place."""
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _folder_rows(path)
    elif path.exists():
        yield from _file_rows(path)
    elif path.suffix in SUFFIXES or source.startswith((".", "/", "~")):
        raise UserError(f"{source} does not exist: check the path")
    else:
        yield from _hub_rows(source)


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
            raise UserError(f"{folder} has no split `train`: point at one of {_listed(data, '/')}")
        data = data["train"]
    for number, values in enumerate(data, start=1):
        yield _Row(str(folder), number, "row", values)


def _hub_rows(source: str) -> Iterator[_Row]:
    name, *selection = source.split(":")
    split = selection.pop() if selection else "train"
    try:
        data = load_dataset(name, *selection, split=split)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{source} is neither a file nor a data set that can be loaded ({reason}); "
            "data sets are written NAME, NAME:SPLIT or NAME:CONFIG:SPLIT"
        ) from error
    for number, values in enumerate(data, start=1):
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
        if error.msg == "Extra data":  # one object a line under the name .json
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
        found = type(values).__name__
        raise UserError(f"{path}, {unit} {number}: expected a JSON object, found {found}")
    return _Row(str(path), number, unit, values)


def _listed(names: Iterable[str], prefix: str = "") -> str:
    return ", ".join(f"`{prefix}{name}`" for name in names)


def _row_messages(row: _Row, prompt_column: str | None) -> list[Message]:
    """The messages of a row, whatever its shape."""
    values = row.values
    if prompt_column is not None:
        if values.get(prompt_column) is None:
            raise UserError(
                f"{row.place}: no column `{prompt_column}`; found are {_listed(values)}"
            )
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
        f"{row.place}: no column that holds a conversation; found are {_listed(values)}, "
        f"understood are {_listed((*MESSAGE_COLUMNS, TURN_COLUMN, *PROMPT_COLUMNS))}; "
        "a prompt column of another name can be named (--prompt-column)"
    )


def _prompt_messages(row: _Row, column: str) -> list[Message]:
    """A prompt, its `input` (Alpaca) if there is one, and its answer if that is text."""
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
    """One message as role and content; its other keys are kept for the template."""
    if not isinstance(raw, dict):
        raise UserError(f"{row.place}: a message must be an object, found {raw!r:.60}")
    if "from" in raw and "value" in raw:
        role, content = SHAREGPT_ROLES.get(str(raw["from"]).lower()), raw["value"]
        if role is None:
            known = _listed(SHAREGPT_ROLES)
            raise UserError(f"{row.place}: unknown role `{raw['from']}`; understood are {known}")
        return {"role": role, "content": _text(row, content)}
    if not isinstance(raw.get("role"), str):
        raise UserError(
            f"{row.place}: a message needs `role` and `content`, or `from` and `value`; "
            f"found are {_listed(raw)}"
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


# ------------------------------------------------------------------------------------- marking


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError, with the fix, if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template: use "
            "the instruction-tuned model, or set tokenizer.chat_template and save the tokenizer"
        )


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    where: str,
    add_generation_prompt: bool = False,
) -> str:
    """The text of a conversation under the tokenizer's chat template.

    Raises UserError, naming `where`, if there is no template or if it refuses the messages.
    """
    require_chat_template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"{where}: the chat template refuses the roles {roles} ({error}); "
            "remove or merge the messages it does not take"
        ) from error
    return str(text)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str
) -> list[int]:
    """Token ids [T] that ask the target for the next answer; errors as `render`."""
    text = render(tokenizer, messages, where, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of control tokens: the named special ones and the added ones flagged special."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids))


def mark_answers(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str = "the conversation"
) -> SupervisedTokens:
    """The whole conversation's ids and a mask of what the assistant has to emit.

    An answer is what the template adds to the prompt of its turn, up to and including the first
    control token after the text (the end-of-turn; the line break that templates put behind it is
    never generated). A token that straddles a boundary holds text that the assistant does not
    write, and at decoding the prompt is tokenised alone: it is not supervised. An answer that
    the full rendering does not show as it was generated (a template that drops earlier reasoning,
    or moves the system text to the last turn) is left unsupervised.

    Raises UserError if the template refuses the messages or offsets cannot be had.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} gives no character offsets: load a fast tokenizer"
        )
    text = render(tokenizer, messages, where)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = encoded["input_ids"]
    if ids != tokenizer.apply_chat_template(messages, return_dict=False):
        raise UserError(f"{where}: the tokenizer encodes the rendered text in another way itself")
    bounds = _contiguous(encoded["offset_mapping"])
    blank = [not text[start:end].strip() for start, end in bounds]
    controls = special_ids(tokenizer)
    mask = [False] * len(ids)
    for index, message in enumerate(messages):
        span = _answer_span(tokenizer, messages, index, text, where)
        if span is None:
            continue
        inside = [i for i, (s, e) in enumerate(bounds) if s >= span[0] and e <= span[1]]
        control = [ids[i] in controls for i in inside]
        finished = message.get("finished", True)
        for i in inside[: _answer_length(control, [blank[i] for i in inside], finished)]:
            mask[i] = True
    return SupervisedTokens(ids, mask)


def _contiguous(offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Character bounds of tokens without gaps.

    Byte-level tokenizers report " the" without its space: in "of the" the offsets are (0, 2),
    (3, 6) and the bounds (0, 2), (2, 6).
    """
    reached = 0
    bounds = []
    for start, end in offsets:
        bounds.append((min(start, reached), end))
        reached = max(reached, end)
    return bounds


def _answer_span(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    index: int,
    text: str,
    where: str,
) -> tuple[int, int] | None:
    """Where message `index` stands in the full rendering, or None if it is no prompted answer."""
    if messages[index]["role"] != "assistant" or index == 0:
        return None
    before, upto = messages[:index], messages[: index + 1]
    prompt = render(tokenizer, before, where, add_generation_prompt=True)
    shown = text if len(upto) == len(messages) else render(tokenizer, upto, where)
    start, end = _common(prompt, text), _common(shown, text)
    if start < len(prompt):
        # The full text may lack the end of the generation prompt (an opened <think>), but it must
        # share its beginning; otherwise the user's part differs and the span would cover it.
        history = _common(prompt, render(tokenizer, before, where))
        if start <= history:
            return None
    if end < len(shown) and messages[index]["content"].strip() not in text[start:end]:
        return None
    return (start, end) if start < end else None


def _common(left: str, right: str) -> int:
    """Length of the longest common prefix."""
    if right.startswith(left):
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), len(right))


def _answer_length(control: list[bool], blank: list[bool], finished: bool) -> int:
    """How many tokens of a span the assistant emits.

    With the tokens  Hello  .  <|end|>  "\\n"  the tail starts at 2, and 3 tokens are emitted;
    2 if the answer was cut before its end-of-turn.
    """
    tail = len(control)
    while tail > 0 and (control[tail - 1] or blank[tail - 1]):
        tail -= 1
    if not finished:
        return tail
    return control.index(True, tail) + 1 if True in control[tail:] else len(control)


def supervise(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str = "the conversation"
) -> SupervisedTokens:
    """As `mark_answers`, but a conversation without a supervised token is a UserError."""
    marked = mark_answers(tokenizer, messages, where)
    if not any(marked.mask):
        answered = any(message["role"] == "assistant" for message in messages[1:])
        reason = (
            "the template shows none of the answers as the prompt of its turn asks for it"
            if answered
            else "no message asks and no assistant answers; distill the prompts first"
        )
        raise UserError(f"0 supervised tokens in {where}: {reason}")
    return marked


def supervise_rows(
    tokenizer: PreTrainedTokenizerBase, conversations: list[Conversation], max_length: int
) -> SupervisedRows:
    """`supervise` each conversation and keep its first `max_length` tokens.

    Rows whose truncation leaves no supervised token are dropped and reported. Raises UserError
    as `supervise` does, and if no row is left.
    """
    rows: list[SupervisedTokens] = []
    truncated, dropped = 0, []
    for conversation in conversations:
        marked = supervise(tokenizer, conversation.messages, conversation.where)
        truncated += len(marked.input_ids) > max_length
        if any(marked.mask[:max_length]):
            rows.append(SupervisedTokens(marked.input_ids[:max_length], marked.mask[:max_length]))
        else:
            dropped.append(conversation.where)
    if not rows:
        raise UserError(
            f"no answer of {len(conversations)} rows begins within {max_length} tokens: "
            "raise the maximum length"
        )
    if truncated:
        logger.info(
            "%d of %d rows cut to %d tokens, %d of them dropped because no answer was left%s",
            truncated,
            len(conversations),
            max_length,
            len(dropped),
            f" (the first is {dropped[0]})" if dropped else "",
        )
    return SupervisedRows(rows, truncated, tuple(dropped))
