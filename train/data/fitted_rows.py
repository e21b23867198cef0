"""Conversations as sequences that fit into a row: longer ones are split at turns, or cut.

Each sequence of a split conversation begins as the chat template begins any conversation, with the
system message, as if the turns before it had never been said. The first of its turns may be
context, which is read and not learnt again; what is learnt follows.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from drafthead.core.errors import UserError
from drafthead.core.target.chat_template import TemplateArguments
from drafthead.train.data.conversations import AnswerTokens, Conversation
from drafthead.train.data.left_out import LeftOut, UnusableRowError
from drafthead.train.data.row_forms import Message
from drafthead.train.data.sequences import SupervisedTokens
from drafthead.train.data.supervision import (
    Rendering,
    join_turns,
    mark_answers,
    refuse_missing_tokens,
    supervised_sequences,
    unread_by_template,
)

BEGINNING = ("system", "developer")  # roles whose messages stay at the beginning of every sequence


def turn_starts(messages: list[Message]) -> list[int]:
    """Numbers of the messages at which turns start; the last entry is where the last turn ends.

    A turn is what is asked after an answer, and all that answers it: calls of tools belong to it.
    The roles  system user assistant user assistant tool assistant user  have the starts [1, 3, 7]:
    nobody answers the last message.
    """
    roles = [message["role"] for message in messages]
    end = max((i + 1 for i, role in enumerate(roles) if role == "assistant"), default=0)
    first = next((i for i, role in enumerate(roles) if role not in BEGINNING), end)
    asked = (*BEGINNING, "user")
    later = [i for i in range(first + 1, end) if roles[i - 1] == "assistant" and roles[i] in asked]
    return [first, *later, end]


@dataclass(frozen=True)
class FittedTurns:
    """The turns of one conversation, and the sequences that some of them make."""

    messages: list[Message]
    starts: list[int]  # see `turn_starts`
    answers: Mapping[int, list[int]] | None  # stored ids [T], by number of the message
    rendering: Rendering

    @classmethod
    def of(
        cls, conversation: Conversation, starts: list[int], rendering: Rendering
    ) -> "FittedTurns | None":
        """The turns of a conversation whose turns start at the messages `starts`.

        None when a row's prompts are not what the template makes of its messages: then nobody
        knows what the prompt of a part would have been.
        """
        messages, answers = conversation.messages, None
        if conversation.tokens is not None:
            stored = conversation.tokens.answers
            numbers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            try:
                dated = [
                    rendering.dated(messages[:i], turn.prompt)
                    for i, turn in zip(numbers, stored, strict=True)
                ]
                prompts = [
                    one.ids(messages[:i], True) for one, i in zip(dated, numbers, strict=True)
                ]
            except UnusableRowError:  # of messages that the template refuses
                return None
            if prompts != [turn.prompt for turn in stored]:
                return None
            rendering = dated[0] if dated else rendering  # parts are of one day
            answers = {i: turn.answer for i, turn in zip(numbers, stored, strict=True)}
        return cls(messages, starts, answers, rendering)

    def __len__(self) -> int:
        """Number of turns."""
        return len(self.starts) - 1

    def sequences(self, first: int, learnt: int, end: int) -> list[SupervisedTokens]:
        """Return what the turns `first` to `end` make, of which those from `learnt` on are learnt.

        Of text it is one sequence, of stored ids as many as `join_turns` makes.
        """
        if self.answers is None:
            context = len(self._messages(first, self.starts[learnt]))
            return [mark_answers(self.rendering, self._messages(first, self.starts[end]), context)]
        numbers = [i for i in self.answers if self.starts[learnt] <= i < self.starts[end]]
        prompts = [self.rendering.ids(self._messages(first, i), True) for i in numbers]
        answers = [self.answers[i] for i in numbers]
        return join_turns([AnswerTokens(*each) for each in zip(prompts, answers, strict=True)])

    def length(self, first: int, learnt: int, end: int) -> int:
        """Tokens of the longest of these `sequences`."""
        if self.answers is None:
            return len(self.rendering.ids(self._messages(first, self.starts[end])))
        made = self.sequences(first, learnt, end)
        return max((len(one.input_ids) for one in made), default=0)

    def _messages(self, first: int, end: int) -> list[Message]:
        """The beginning, and the messages from turn `first` up to message `end`."""
        return self.messages[: self.starts[0]] + self.messages[self.starts[first] : end]


def split(turns: FittedTurns, max_length: int) -> Iterator[SupervisedTokens]:
    """Sequences of at most `max_length` tokens that learn every turn once.

    A sequence learns as many turns as fill half of its tokens, or one; the turns before them are
    its context, as many as then fit. The first sequence needs no context and is filled. Turns
    a b c d e of 3 tokens each make, in 8 tokens, these sequences, of which the capitals are learnt:
    AB, bC, cD, dE. A turn that is longer alone is a sequence of that length.
    """
    learnt = 0
    while learnt < len(turns):
        room = max_length // 2 if learnt else max_length
        end = learnt + 1
        while end < len(turns) and turns.length(learnt, learnt, end + 1) <= room:
            end += 1
        first = learnt
        while first > 0 and turns.length(first - 1, learnt, end) <= max_length:
            first -= 1
        yield from turns.sequences(first, learnt, end)
        learnt = end


@dataclass(frozen=True)
class Reading:
    """The settings by which a source is read."""

    source: str
    prompt_column: str | None
    max_length: int  # tokens; longer conversations are split at turns
    limit: int | None  # conversations, from the first
    vocab_size: int | None = None  # tokens that the target has embeddings for; None: not known
    # Of the chat template, for rows that do not say otherwise.
    template_arguments: TemplateArguments = field(default_factory=dict)
    strict: bool = False  # a row that cannot be used is an error


def fitted_rows(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[Conversation],
    reading: Reading,
    left_out: LeftOut,
) -> Iterator[SupervisedTokens]:
    """The sequences of all conversations, of at most `reading.max_length` tokens, as they come.

    A longer conversation is split at its turns; a turn that is longer alone is cut.
    What has nothing to learn is added to `left_out`. Raises UserError if nothing else was there,
    and for a tokenizer that cannot be used.
    """
    count, found = 0, False
    for conversation in conversations:
        count += 1
        try:
            sequences = sequences_of(tokenizer, conversation, reading, left_out)
        except UnusableRowError as error:
            left_out.leave(error)
            continue
        left_out.note_unread(unread_by_template(tokenizer, conversation))
        for marked in sequences:
            is_cut = len(marked.input_ids) > reading.max_length
            left_out.cut += is_cut
            kept = SupervisedTokens(
                marked.input_ids[: reading.max_length], marked.mask[: reading.max_length]
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
        f"no answer of {count} rows begins within {reading.max_length} tokens: raise the maximum "
        "length"
    )


def sequences_of(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    reading: Reading,
    left_out: LeftOut,
) -> list[SupervisedTokens]:
    """The sequences of one conversation, split if it is too long and has turns to split at.

    Raises UnusableRowError, also for a token that the target has no embedding for.
    """
    made = supervised_sequences(tokenizer, conversation, reading.template_arguments)
    for one in made:
        refuse_missing_tokens(one.input_ids, reading.vocab_size, tokenizer, conversation.where)
    if all(len(one.input_ids) <= reading.max_length for one in made):
        return made
    starts = turn_starts(conversation.messages)
    if len(starts) < 3:
        return made
    rendering = Rendering.of(tokenizer, conversation, reading.template_arguments)
    turns = FittedTurns.of(conversation, starts, rendering)
    if turns is None:
        left_out.fixed += 1
        return made
    parts = [one for one in split(turns, reading.max_length) if any(one.mask)]
    left_out.split += 1
    left_out.parts += len(parts)
    return parts or made
