"""Reading a row of any form: messages, the template's arguments, columns that are used.

Forms: `messages` (role and content, or ShareGPT's from and value), `turns` (user texts), and a
prompt with or without an answer. Beside them a row may have a system message, earlier turns and
what its chat template reads in columns of their own.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from drafthead.core.errors import UserError
from drafthead.core.target.chat_template import RESERVED
from drafthead.infer.request.messages import with_calls
from drafthead.train.data.left_out import UnusableRowError
from drafthead.train.data.row_sources import SourceRow

# `role`, `content`, and other keys that the template reads. `finished: False` on an assistant
# message means that it was cut before its end-of-turn, which is then not supervised.
Message: TypeAlias = dict[str, Any]

MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
TURN_COLUMN = "turns"
PROMPT_COLUMNS = ("prompt", "question", "instruction", "text")
ANSWER_COLUMNS = ("answer", "response", "output", "completion")
INPUT_COLUMN = "input"  # Alpaca's, which belongs to `instruction`
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
HISTORY_COLUMN = "history"  # earlier turns, as pairs of question and answer
ARGUMENTS_COLUMN = "chat_template_kwargs"  # what other trainers call them
LISTED_ARGUMENTS = ("tools", "documents")  # of the template, in columns of their own
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
TEXT_PARTS = (None, "text", "input_text", "output_text")  # types of parts that are texts
# Keys of an assistant's message that may stand in place of a text.
INSTEAD_OF_TEXT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class RowContent:
    """The content of a row, as far as it is read."""

    messages: list[Message]
    template_arguments: dict[str, Any]
    unread: list[str]  # columns that hold something, and that are not read


def content_of(row: SourceRow, prompt_column: str | None) -> RowContent:
    """The messages of a row of any known form, and what belongs to them.

    `prompt_column` holds the user's text and goes before all other columns. Raises UnusableRowError
    for a row that cannot be read as it was meant.
    """
    columns = _Columns(row)
    messages = _messages(columns, prompt_column)
    if not messages:
        raise UnusableRowError(f"{row.place}: there are no messages")
    messages = _with_system(columns, messages)
    arguments = _template_arguments(columns)
    return RowContent(messages, arguments, sorted(columns.values.keys() - columns.used))


class _Columns:
    """The columns of a row that hold something, and which of them were used."""

    def __init__(self, row: SourceRow):
        self.place, self.from_arrow, self.names = row.place, row.from_arrow, list(row.values)
        self.values = {name: value for name, value in row.values.items() if value is not None}
        self.used: set[str] = set()

    def take(self, name: str) -> Any:
        """A column's value, without what Arrow has filled in.

        Raises UnusableRowError for text that cannot be written as UTF-8.
        """
        self.used.add(name)
        return _plain(self.values[name], self.from_arrow, f"{self.place}: `{name}`")

    def listed(self, name: str) -> list[Any] | None:
        """A column that is a list, or the JSON text of one; None for any other."""
        value = self.values.get(name)
        value = _from_json(value) if isinstance(value, str) else value
        if not isinstance(value, list):
            return None
        self.used.add(name)
        return _plain(value, self.from_arrow, f"{self.place}: `{name}`")

    def refused(self, reason: str) -> UnusableRowError:
        """The error that says why the row cannot be used."""
        return UnusableRowError(f"{self.place}: {reason}")


def _plain(value: Any, from_arrow: bool, place: str) -> Any:
    """The value without nulls in objects, where Arrow may have put them.

    Raises UnusableRowError for half of a surrogate pair, which is no character.
    """
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                half = f"U+{ord(value[error.start]):04X}"
                raise UnusableRowError(f"{place} holds half of a character ({half})") from error
        return value
    if isinstance(value, list):
        return [_plain(one, from_arrow, place) for one in value]
    if isinstance(value, dict):
        return {
            _plain(key, from_arrow, place): _plain(one, from_arrow, place)
            for key, one in value.items()
            if one is not None or not from_arrow
        }
    return value


def _from_json(text: str) -> Any:
    """Return what a text says in JSON; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _messages(columns: _Columns, prompt_column: str | None) -> list[Message]:
    """The messages of the first known form; UnusableRowError where there is none."""
    if prompt_column is not None:
        if prompt_column not in columns.values:
            raise columns.refused(_why_missing(columns, [prompt_column]))
        return _prompt_messages(columns, prompt_column)
    for column in MESSAGE_COLUMNS:
        listed = columns.listed(column)
        if listed is not None:
            return _listed_messages(columns, listed)
    turns = columns.listed(TURN_COLUMN)
    if turns is not None:
        return [_message(columns, {"role": "user", "content": text}) for text in turns]
    for column in PROMPT_COLUMNS:
        if column in columns.values:
            return _prompt_messages(columns, column)
    known = (*MESSAGE_COLUMNS, TURN_COLUMN, *PROMPT_COLUMNS)
    raise columns.refused(
        f"{_why_missing(columns, known)}; known columns are {named(known)}; name another prompt "
        "column by --prompt-column, in training by data.prompt_column, or rename it"
    )


def _why_missing(columns: _Columns, wanted: Iterable[str]) -> str:
    """Say why a row has none of the columns that are wanted."""
    if empty := [name for name in wanted if name in columns.names and name not in columns.values]:
        return f"{named(empty)} is null"
    if wrong := [name for name in wanted if name in columns.values]:
        kind = type(columns.values[wrong[0]]).__name__
        return f"{named(wrong[:1])} must be a list, found {kind}"
    if isinstance(wanted, list):
        return f"no column {named(wanted)}, but {named(columns.names)}"
    return f"no column that holds a conversation in {named(columns.names)}"


def named(names: Iterable[str]) -> str:
    """Names for a sentence."""
    return ", ".join(f"`{name}`" for name in names)


def _prompt_messages(columns: _Columns, column: str) -> list[Message]:
    """Earlier turns, a prompt with its `input` (Alpaca) if there is one, and its answer."""
    prompt = columns.take(column)
    if isinstance(prompt, list):  # prompt and completion as lists of messages
        messages = _listed_messages(columns, prompt)
    else:
        text = prompt
        if column == "instruction" and isinstance(columns.values.get(INPUT_COLUMN), str):
            given = columns.take(INPUT_COLUMN)
            text = f"{prompt}\n\n{given}" if given else prompt
        messages = [_message(columns, {"role": "user", "content": text})]
    return [*_history(columns), *messages, *_answer(columns, column)]


def _answer(columns: _Columns, prompt_column: str) -> list[Message]:
    """The answer of a prompt, if the row has one."""
    for column in ANSWER_COLUMNS:
        if column == prompt_column or not columns.values.get(column):
            continue
        value = columns.values[column]
        if isinstance(value, str):
            return [{"role": "assistant", "content": columns.take(column)}]
        if isinstance(value, list) and isinstance(value[0], dict):
            return _listed_messages(columns, columns.take(column))
    return []


def _history(columns: _Columns) -> list[Message]:
    """Earlier turns: pairs of question and answer, or messages."""
    turns = columns.listed(HISTORY_COLUMN) or []
    if turns and isinstance(turns[0], dict):
        return _listed_messages(columns, turns)
    messages: list[Message] = []
    for turn in turns:
        if not isinstance(turn, list) or len(turn) != 2:
            raise columns.refused(
                f"`{HISTORY_COLUMN}` must hold pairs of texts, found {turn!r:.60}"
            )
        for role, text in zip(("user", "assistant"), turn, strict=True):
            messages.append(_message(columns, {"role": role, "content": text}))
    return messages


def _with_system(columns: _Columns, messages: list[Message]) -> list[Message]:
    """The messages after the system message of a column of its own, if they begin with none."""
    for column in SYSTEM_COLUMNS:
        text = columns.values.get(column)
        if not isinstance(text, str):
            continue
        begins = messages[0]["role"] in ("system", "developer")
        if not text.strip() or (begins and messages[0]["content"].strip() == text.strip()):
            columns.used.add(column)
        elif not begins:
            messages = [{"role": "system", "content": columns.take(column)}, *messages]
    return messages


def _template_arguments(columns: _Columns) -> dict[str, Any]:
    """The arguments of the chat template that a row gives."""
    arguments: dict[str, Any] = {}
    if ARGUMENTS_COLUMN in columns.values:
        given = columns.take(ARGUMENTS_COLUMN)
        given = _from_json(given) if isinstance(given, str) else given
        if not isinstance(given, dict):
            raise columns.refused(f"`{ARGUMENTS_COLUMN}` must be an object, found {given!r:.60}")
        if reserved := sorted(RESERVED & given.keys()):
            raise columns.refused(
                f"`{ARGUMENTS_COLUMN}` sets {named(reserved)}, which is not the template's"
            )
        arguments |= given
    for name in LISTED_ARGUMENTS:
        if columns.values.get(name) in (None, ""):
            columns.used.add(name)
            continue
        listed = columns.listed(name)
        entries = [_from_json(one) if isinstance(one, str) else one for one in listed or []]
        if listed is None or not all(isinstance(one, dict) for one in entries):
            found = columns.values[name]
            raise columns.refused(f"`{name}` must be a list of objects, found {found!r:.60}")
        arguments[name] = entries
    return arguments


def _listed_messages(columns: _Columns, listed: Iterable[Any]) -> list[Message]:
    return [_message(columns, raw) for raw in listed]


def _message(columns: _Columns, raw: Any) -> Message:
    """One message as role and content; other keys are left for the template."""
    if not isinstance(raw, dict):
        raise columns.refused(f"a message must be an object, found {raw!r:.60}")
    given = {key: value for key, value in raw.items() if value is not None}
    if "from" in given and "role" not in given:
        role, key = SHAREGPT_ROLES.get(str(given["from"]).lower()), "value"
        if role is None:
            raise columns.refused(
                f"unknown role `{given['from']}`; known are {named(SHAREGPT_ROLES)}"
            )
    else:
        role, key = given.get("role"), "content"
    if not isinstance(role, str) or not role:
        raise columns.refused(
            f"a message needs `role` and `content`, or `from` and `value`; it has {named(raw)}"
        )
    own = ("role", "content") if key == "content" else ("from", "value", "content")
    others = {name: value for name, value in given.items() if name not in own}
    try:
        others = dict(with_calls(others))
    except UserError as error:
        raise columns.refused(str(error)) from error
    return {"role": role, "content": _text(columns, role, given.get(key), others), **others}


def is_unwritten(message: Mapping[str, Any]) -> bool:
    """Tell whether a message has no text, and something else in its place."""
    has_text = bool((message.get("content") or "").strip())
    return not has_text and any(message.get(key) for key in INSTEAD_OF_TEXT)


def _text(columns: _Columns, role: str, content: Any, others: Mapping[str, Any]) -> str:
    """Content as text; a list of text parts is joined."""
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant" and is_unwritten(others):
            return ""
        raise columns.refused(f"a message of role `{role}` has no content")
    if not isinstance(content, list):
        raise columns.refused(f"the content of a message must be text, found {content!r:.60}")
    texts = []
    for part in content:
        if not isinstance(part, dict):
            raise columns.refused(f"a part of a message must be an object, found {part!r:.60}")
        kind, text = part.get("type"), part.get("text")
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise columns.refused(
                f"a part of a message must be text, found one of type `{kind}`, {part!r:.60}"
            )
        texts.append(text)
    return "".join(texts)
