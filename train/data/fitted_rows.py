"""Conversations as sequences that fit into a row, and the count of what does not fit."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.train.data.conversations import Conversation
from drafthead.train.data.splitting import Dialogue, split, turn_starts
from drafthead.train.data.supervision import (
    SupervisedTokens,
    UnusableRowError,
    supervised_sequences,
)


@dataclass
class LeftOut:
    """What training does not see of a data set as it is there."""

    rows: int = 0  # all there are
    split: int = 0  # rows that were split at turns
    parts: int = 0  # sequences that these have become
    fixed: int = 0  # rows with several turns whose prompts the template does not make
    cut: int = 0  # sequences that were cut, those in `too_late` included
    problems: list[str] = field(default_factory=list)  # rows that cannot be used, and why
    too_late: list[str] = field(default_factory=list)  # places of sequences cut before their answer

    def sentences(self, max_length: int) -> list[str]:
        """What a user should know of it."""
        sentences = []
        if self.problems:
            counts = f"{len(self.problems)} of {self.rows}"
            sentences.append(f"{counts} rows are left out; the first: {self.problems[0]}")
        if self.split:
            sentences.append(
                f"{self.split} of {self.rows} rows are longer than {max_length} tokens and are "
                f"split at turns into {self.parts} sequences"
            )
        if self.fixed:
            sentences.append(
                f"{self.fixed} of {self.rows} rows are longer than {max_length} tokens and cannot "
                "be split: their prompts are not what the chat template makes of their messages"
            )
        if self.cut:
            first = f" (the first is {self.too_late[0]})" if self.too_late else ""
            sentences.append(
                f"{self.cut} sequences that cannot be split are cut to {max_length} tokens, "
                f"{len(self.too_late)} of them dropped because no answer was left{first}"
            )
        return sentences


def fitted_rows(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[Conversation],
    max_length: int,
    left_out: LeftOut,
) -> Iterator[SupervisedTokens]:
    """The sequences of all conversations, of at most `max_length` tokens, as they come.

    A longer conversation is split at its turns (`splitting`); a turn that is longer alone is cut.
    What has nothing to learn is added to `left_out`. Raises UserError if nothing else was there,
    and for a tokenizer that cannot be used.
    """
    found = False
    for conversation in conversations:
        left_out.rows += 1
        try:
            sequences = supervised_sequences(tokenizer, conversation)
            if any(len(one.input_ids) > max_length for one in sequences):
                sequences = parts(tokenizer, conversation, max_length, left_out) or sequences
        except UnusableRowError as error:
            left_out.problems.append(str(error))
            continue
        for marked in sequences:
            left_out.cut += len(marked.input_ids) > max_length
            kept = SupervisedTokens(marked.input_ids[:max_length], marked.mask[:max_length])
            if any(kept.mask):
                found = True
                yield kept
            else:
                left_out.too_late.append(conversation.where)
    if len(left_out.problems) == left_out.rows:
        raise UserError(left_out.problems[0])
    if not found:
        raise UserError(
            f"no answer of {left_out.rows} rows begins within {max_length} tokens: "
            "raise the maximum length"
        )


def parts(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    max_length: int,
    left_out: LeftOut,
) -> list[SupervisedTokens]:
    """The sequences that a conversation is split into; none when it has no turns to split at."""
    starts = turn_starts(conversation.messages)
    if len(starts) < 3:
        return []
    dialogue = Dialogue.of(tokenizer, conversation, starts)
    if dialogue is None:
        left_out.fixed += 1
        return []
    made = [one for one in split(dialogue, max_length) if any(one.mask)]
    left_out.split += 1
    left_out.parts += len(made)
    return made
