"""Conversations as sequences that fit into a row, and the count of what does not fit."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.heads.target.chat_template import TemplateArguments
from drafthead.train.data.conversations import Conversation
from drafthead.train.data.left_out import LeftOut, UnusableRowError
from drafthead.train.data.splitting import Dialogue, split, turn_starts
from drafthead.train.data.supervision import (
    SupervisedTokens,
    refuse_missing_tokens,
    supervised_sequences,
    unread_by_template,
)


@dataclass(frozen=True)
class Fit:
    """What sequences must fit, and how rows are rendered that do not say it themselves."""

    max_length: int  # tokens; longer conversations are split at turns
    vocab_size: int | None = None  # tokens that the target has embeddings for; None: not known
    template_arguments: TemplateArguments = field(default_factory=dict)


def fitted_rows(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[Conversation],
    fit: Fit,
    left_out: LeftOut,
) -> Iterator[SupervisedTokens]:
    """The sequences of all conversations, of at most `fit.max_length` tokens, as they come.

    A longer conversation is split at its turns (`splitting`); a turn that is longer alone is cut.
    What has nothing to learn is added to `left_out`. Raises UserError if nothing else was there,
    and for a tokenizer that cannot be used.
    """
    count, found = 0, False
    for conversation in conversations:
        count += 1
        try:
            sequences = sequences_of(tokenizer, conversation, fit, left_out)
        except UnusableRowError as error:
            left_out.leave(error)
            continue
        left_out.note_unread(unread_by_template(tokenizer, conversation))
        for marked in sequences:
            is_cut = len(marked.input_ids) > fit.max_length
            left_out.cut += is_cut
            kept = SupervisedTokens(
                marked.input_ids[: fit.max_length], marked.mask[: fit.max_length]
            )
            if kept.teaches:
                found = True
                yield kept
            elif is_cut:
                left_out.too_late += 1
                left_out.first_too_late = left_out.first_too_late or conversation.where
    if found:
        return
    if left_out.problems and not left_out.too_late:
        raise UserError(f"no row can be used; the first: {left_out.problems[0]}")
    raise UserError(
        f"no answer of {count} rows begins within {fit.max_length} tokens: raise the maximum length"
    )


def sequences_of(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, fit: Fit, left_out: LeftOut
) -> list[SupervisedTokens]:
    """The sequences of one conversation, split if it is too long.

    Raises UnusableRowError, also for a token that the target has no embedding for.
    """
    made = supervised_sequences(tokenizer, conversation, fit.template_arguments)
    for one in made:
        refuse_missing_tokens(one.input_ids, fit.vocab_size, tokenizer, conversation.where)
    if any(len(one.input_ids) > fit.max_length for one in made):
        return parts(tokenizer, conversation, fit, left_out) or made
    return made


def parts(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, fit: Fit, left_out: LeftOut
) -> list[SupervisedTokens]:
    """The sequences that a conversation is split into; none when it has no turns to split at."""
    starts = turn_starts(conversation.messages)
    if len(starts) < 3:
        return []
    dialogue = Dialogue.of(tokenizer, conversation, starts, fit.template_arguments)
    if dialogue is None:
        left_out.fixed += 1
        return []
    made = [one for one in split(dialogue, fit.max_length) if any(one.mask)]
    left_out.split += 1
    left_out.parts += len(made)
    return made
