"""A conversation while it is being answered, turn after turn."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafthead.core.errors import UserError
from drafthead.core.target.chat_template import TemplateArguments
from drafthead.infer.request.stopping import FinishReason
from drafthead.infer.serving import Answer, ServeRequest
from drafthead.train.data.conversations import (
    CATEGORY_COLUMN,
    IDS_COLUMN,
    AnswerTokens,
    Conversation,
    row_seed,
)
from drafthead.train.data.left_out import UnusableRowError
from drafthead.train.data.row_forms import ARGUMENTS_COLUMN, LISTED_ARGUMENTS, Message
from drafthead.train.data.supervision import Rendering
from drafthead.train.distillation.answer_source import AnswersPrompts, EncodedAnswer
from drafthead.train.distillation.distilled_file import (
    FROM_TEXT_COLUMN,
    REASONS_COLUMN,
)
from drafthead.train.settings import DistillSettings


@dataclass(frozen=True)
class DialogueJob:
    """A conversation that is to be answered."""

    conversation: Conversation
    turns: list[list[Message]]  # each ends with the user message to answer
    question: str  # see `question_of`
    arguments: TemplateArguments
    prompt_length: int  # tokens of the first prompt


class Dialogue:
    """A job with the answers that it has so far."""

    def __init__(self, job: DialogueJob, settings: DistillSettings):
        self.conversation, self.turns, self.question = job.conversation, job.turns, job.question
        self.settings, self.arguments = settings, job.arguments
        self.messages: list[Message] = []
        self.answers: list[AnswerTokens] = []
        self.reasons: list[FinishReason | None] = []  # why each answer ended
        self.prompt: list[int] = []  # of the turn that was asked for last
        self.from_text = False  # the ids of some answer were encoded again

    def request(self, number: int, source: AnswersPrompts) -> ServeRequest | None:
        """The next turn to answer; None after the last, and if its prompt does not fit.

        That is also a prompt that the template refuses after the answers so far.
        """
        turn = len(self.answers)
        if turn == len(self.turns) or self.is_dropped:
            return None
        messages = self.messages + self.turns[turn]
        rendering = Rendering(source.tokenizer, self.conversation.where, self.arguments)
        try:
            self.prompt = rendering.ids(messages, add_generation_prompt=True)
        except UnusableRowError:
            return None
        if source.max_length is not None and len(self.prompt) >= source.max_length:
            return None
        seed = row_seed(self.settings.seed, self.conversation.id, turn)
        return ServeRequest(self.prompt, number, seed=seed)

    def take(self, given: Answer, source: AnswersPrompts) -> None:
        """Add the answer to the turn that was asked for last."""
        ids = given.tokens
        finished = ids[-1] in source.end_ids
        text = answer_text(source.tokenizer, ids, finished)
        answer: Message = {"role": "assistant", "content": text, "finished": finished}
        self.messages += [*self.turns[len(self.answers)], answer]
        self.answers.append(AnswerTokens(self.prompt, ids))
        self.reasons.append(given.finish_reason)
        self.from_text |= isinstance(given, EncodedAnswer)

    @property
    def is_dropped(self) -> bool:
        """Tell whether its row is not to be written."""
        return self.settings.drop_cut and "length" in self.reasons

    @property
    def is_shortened(self) -> bool:
        """Tell whether later turns were left out, since they did not fit."""
        return len(self.answers) < len(self.turns) and not self.is_dropped

    def row(self) -> dict[str, Any]:
        """The row of the output file: text for people, token ids for training."""
        settings = self.settings
        row = {
            "id": self.conversation.id,
            "messages": self.messages,
            "finished": all(message.get("finished", True) for message in self.messages),
            "tokens": sum(len(turn.answer) for turn in self.answers),
            "target": settings.target,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed,
            "source": self.conversation.source,
            "question": self.question,
            REASONS_COLUMN: self.reasons,
            IDS_COLUMN: [asdict(answer) for answer in self.answers],
        }
        row |= {name: self.arguments[name] for name in LISTED_ARGUMENTS if name in self.arguments}
        if others := {k: v for k, v in self.arguments.items() if k not in LISTED_ARGUMENTS}:
            row[ARGUMENTS_COLUMN] = others
        if self.conversation.category is not None:
            row[CATEGORY_COLUMN] = self.conversation.category
        if self.from_text:
            row[FROM_TEXT_COLUMN] = True
        return row


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], finished: bool) -> str:
    """The text of an answer [T] without its end token; control tokens inside it are shown.

    A message must hold them, or the next prompt would lack the marks of channels and tools.
    """
    shown = list(ids[:-1] if finished else ids)
    text = str(tokenizer.decode(shown, clean_up_tokenization_spaces=False))
    return text if finished else text.rstrip("\ufffd")  # the cut may go through a character


ASKED = ("system", "developer", "user")  # roles whose messages can be sent to another model


def with_system(conversations: Sequence[Conversation], system: str | None) -> list[Conversation]:
    """The conversations, each with a system message; those that begin with one keep theirs."""
    if system is None:
        return list(conversations)
    message: Message = {"role": "system", "content": system}
    return [
        one
        if one.messages[0]["role"] in ("system", "developer")
        else replace(one, messages=[message, *one.messages])
        for one in conversations
    ]


def sampled(
    conversations: Sequence[Conversation], samples: int, temperature: float
) -> list[Conversation]:
    """Each conversation `samples` times, under the ids ID, ID#2, ID#3 and so on.

    The seed of a row follows from its id, so more samples leave the first ones as they are.
    Raises UserError where all samples would be the same, and for an id that is there twice.
    """
    if samples < 1:
        raise UserError(f"--samples must be at least 1, got {samples}")
    if samples > 1 and temperature == 0:
        raise UserError(
            f"--samples {samples} at temperature 0 would write the same answer {samples} times: "
            "raise --temperature, or leave --samples out"
        )
    numbered = [
        replace(one, id=one.id if number == 1 else f"{one.id}#{number}")
        for one in conversations
        for number in range(1, samples + 1)
    ]
    seen: set[str] = set()
    for one in numbered:
        if one.id in seen:
            raise UserError(
                f"{one.where}: the id {one.id} is that of another row's sample: give all rows of "
                "the prompts ids of their own"
            )
        seen.add(one.id)
    return numbered


def user_turns(conversation: Conversation) -> list[list[Message]]:
    """The messages to send before each answer; answers found in the source are left out.

    [system, user 1, assistant, user 2] gives [[system, user 1], [user 2]]. Raises UnusableRowError
    if nothing is asked or if a message depends on an answer of another model (tool results).
    """
    turns: list[list[Message]] = []
    pending: list[Message] = []
    for message in conversation.messages:
        if message["role"] not in (*ASKED, "assistant"):
            raise UnusableRowError(
                f"{conversation.where}: a message of role `{message['role']}` belongs to another "
                "model's answer and cannot be replayed"
            )
        if message["role"] == "assistant":
            continue
        pending.append(message)
        if message["role"] == "user":
            turns.append(pending)
            pending = []
    if not turns:
        raise UnusableRowError(f"{conversation.where}: no user message to answer")
    return turns


TEXT_FIELDS = ("role", "content")  # which every message has


def question_of(conversation: Conversation) -> str:
    """A hash of all that is sent to the target of one row: messages and template arguments.

    Raises UnusableRowError as `user_turns` does.
    """
    turns = user_turns(conversation)
    asked: list[object] = []
    for message in (message for turn in turns for message in turn):
        # Names, and whatever else a template may read, where there is any.
        others = {name: value for name, value in message.items() if name not in TEXT_FIELDS}
        asked.append((message["role"], message["content"], *([others] if others else [])))
    if conversation.template_arguments:
        asked.append(conversation.template_arguments)
    text = json.dumps(asked, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
