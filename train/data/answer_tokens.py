"""Answers as the token ids that the target generated, stored in a row beside their text.

Text that is encoded again can give other tokens (` ne|aten` becomes ` n|eat|en`), and what is shown
of a control token may be nothing. Ids hold what the target generated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.heads.target.loading import vocabulary_of
from drafthead.train.data.left_out import UnusableRowError

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


def check_vocabulary(stored: StoredTokens, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise UserError that names `where` if the ids cannot be those of this tokenizer.

    It is an UnusableRowError if they may be, but for an id that the tokenizer does not have.
    """
    if stored.vocabulary != vocabulary_of(tokenizer):
        raise UserError(
            f"the token ids in {where} are not those of the tokenizer of "
            f"{tokenizer.name_or_path or 'this model'}: distil the prompts with this target, or "
            f"remove the column `{IDS_COLUMN}` to train on the text"
        )
    ids = (i for turn in stored.answers for i in (*turn.prompt, *turn.answer))
    largest = max(ids, default=0)
    if largest >= len(tokenizer):
        raise UnusableRowError(
            f"token id {largest} in {where} is beyond the tokenizer's {len(tokenizer)} tokens: "
            "distil the row again"
        )
