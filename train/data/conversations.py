"""Conversations of a source: what its rows say, and where each of them stands.

A row may hold, beside the text of its answers, the token ids that the target generated. Text that
is encoded again can give other tokens (` ne|aten` becomes ` n|eat|en`), and what is shown of a
control token may be nothing.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drafthead.core.errors import UserError
from drafthead.train.data.left_out import LeftOut, UnusableRowError
from drafthead.train.data.row_forms import Message, RowContent, content_of
from drafthead.train.data.row_sources import SourceRow, rows_of

IDS_COLUMN, VOCABULARY_COLUMN, WEIGHTS_COLUMN = "token_ids", "vocabulary", "target_weights"


@dataclass(frozen=True)
class AnswerTokens:
    """One answer: the ids [T] that the target was given, and the ids [T] that it added."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class StoredTokens:
    """The answers of one row, in order, and the vocabulary that their ids refer to."""

    answers: tuple[AnswerTokens, ...]
    vocabulary: str | None


def stored_tokens(values: Mapping[str, Any], place: str) -> StoredTokens | None:
    """The token ids in a row's columns; None if there are none in our form.

    Raises UnusableRowError that names `place` for ids that are no ids.
    """
    turns = values.get(IDS_COLUMN)
    if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) for t in turns):
        return None  # a column of this name in somebody else's form
    for turn in turns:
        for part in ("prompt", "answer"):
            if not _are_ids(turn.get(part)):
                raise UnusableRowError(
                    f"{place}: `{part}` in `{IDS_COLUMN}` must be a list of token ids; remove the "
                    f"column `{IDS_COLUMN}` to train on the text"
                )
    answers = tuple(AnswerTokens(turn["prompt"], turn["answer"]) for turn in turns)
    return StoredTokens(answers, values.get(VOCABULARY_COLUMN))


def _are_ids(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


ID_COLUMNS = ("id", "question_id", "conversation_id", "prompt_id")
CATEGORY_COLUMN = "category"
KIND_COLUMNS = (CATEGORY_COLUMN, "language")
# What rows of `drafthead data distill` say of themselves, and what is read of them elsewhere.
DISTILLED_COLUMNS = {
    "batch", "batch_rows", "finish_reasons", "finished", "ids_from_text", "question", "seed",
    "source", "target", "temperature", "tokens", "top_p", VOCABULARY_COLUMN, WEIGHTS_COLUMN,
}  # fmt: skip


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
    category: str | None = None  # the kind of request, and its language, if the row says it
    # Of the chat template: `tools`, `documents`, `enable_thinking` and others.
    template_arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The place in words, for error messages: "row 17 of FILE"."""
        file, _, row = self.source.rpartition(":")
        return f"row {row} of {file}"


def read_conversations(
    source: str | Path,
    prompt_column: str | None = None,
    limit: int | None = None,
    left_out: LeftOut | None = None,
) -> list[Conversation]:
    """The conversations of `iter_conversations` as a list."""
    return list(iter_conversations(source, prompt_column, limit, left_out))


def iter_conversations(
    source: str | Path,
    prompt_column: str | None = None,
    limit: int | None = None,
    left_out: LeftOut | None = None,
) -> Iterator[Conversation]:
    """The first `limit` conversations of a source, in its order, one at a time.

    source: a .jsonl, .json or .parquet file, a folder of them, a folder written by
        `Dataset.save_to_disk`, or a hub data set as NAME, NAME:SPLIT or NAME:CONFIG:SPLIT.
    prompt_column: the column that holds the user's text; it goes before all other columns.
    left_out: gets the rows that cannot be read and the columns that are not; without it they are
        logged when all was read.

    Forms of rows are those of `row_forms`. Ids that repeat get a suffix: "a", "a#2". Raises
    UserError, with file and line, for a source that cannot be read and where no row can be used.
    """
    if limit is not None and limit < 1:
        raise UserError(f"the limit of rows to read must be at least 1, got {limit}")
    noted = LeftOut() if left_out is None else left_out
    count = 0
    taken: set[str] = set()
    for row in rows_of(str(source)):
        noted.rows += 1
        try:
            conversation, unread = _conversation(row, prompt_column)
        except UnusableRowError as error:
            noted.leave(error)
            continue
        except RecursionError:
            noted.leave(UnusableRowError(f"{row.place}: the row is nested too deeply"))
            continue
        noted.note_unread(f"column `{name}`" for name in unread)
        yield replace(conversation, id=_unique(conversation.id, taken))
        count += 1
        if count == limit:
            break
    if not count:
        raise UserError(_why_nothing(str(source), noted))
    if left_out is None:
        noted.tell(str(source))


def _why_nothing(source: str, left_out: LeftOut) -> str:
    """Say why a source has no conversation."""
    if left_out.problems:
        return f"no row of {source} can be used; the first: {left_out.problems[0]}"
    return f"{source} holds no conversation: add rows or use another source"


def _conversation(row: SourceRow, prompt_column: str | None) -> tuple[Conversation, list[str]]:
    """A row as a conversation, and the columns that are not read; errors as `content_of`."""
    content, values = content_of(row, prompt_column), row.values
    tokens = stored_tokens(values, row.place)
    kinds = [values.get(name) for name in KIND_COLUMNS]
    conversation = Conversation(
        id=_row_id(row),
        messages=content.messages,
        source=f"{row.file}:{row.number}",
        tokens=tokens,
        writer=_row_writer(values),
        category=", ".join(kind for kind in kinds if isinstance(kind, str)) or None,
        template_arguments=content.template_arguments,
    )
    return conversation, _unread(content, conversation)


def _unread(content: RowContent, conversation: Conversation) -> list[str]:
    """Columns of a row that are used nowhere, in their order."""
    known = {*ID_COLUMNS, *KIND_COLUMNS}
    if conversation.tokens is not None:
        known.add(IDS_COLUMN)
    if conversation.writer is not None:
        known |= DISTILLED_COLUMNS
    return [name for name in content.unread if name not in known]


def _row_id(row: SourceRow) -> str:
    for column in ID_COLUMNS:
        if row.values.get(column) not in (None, ""):
            # Half a surrogate pair could be printed nowhere.
            return str(row.values[column]).encode(errors="backslashreplace").decode()
    return f"{Path(row.file).name}:{row.number}"


def _row_writer(values: dict[str, Any]) -> Writer | None:
    """Return who answered a row of data distill; other data has columns `target` of other kinds."""
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


def row_seed(seed: int, row_id: str, turn: int) -> int:
    """The sampling seed of one answer, in [0, 2^63): the same in any batch and any run."""
    digest = hashlib.blake2b(f"{seed}\n{turn}\n{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
