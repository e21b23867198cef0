"""A conversation while it is being answered, turn after turn."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafthead.infer.request.stopping import FinishReason
from drafthead.infer.serving.serve_request import Answer, ServeRequest
from drafthead.train.data.answer_tokens import IDS_COLUMN, AnswerTokens
from drafthead.train.data.conversations import Conversation
from drafthead.train.data.left_out import UnusableRowError
from drafthead.train.data.row_forms import ARGUMENTS_COLUMN, LISTED_ARGUMENTS, Message
from drafthead.train.data.supervision import encode_prompt
from drafthead.train.distillation.answer_source import AnswerSource, EncodedAnswer
from drafthead.train.distillation.answer_statistics import FROM_TEXT_COLUMN, REASONS_COLUMN
from drafthead.train.distillation.questions import row_seed
from drafthead.train.distillation.settings import DistillSettings


@dataclass(frozen=True)
class Job:
    """A conversation that is to be answered."""

    conversation: Conversation
    turns: list[list[Message]]  # each ends with the user message to answer
    question: str  # see `question_of`
    arguments: dict[str, Any]  # of the chat template
    prompt_length: int  # tokens of the first prompt


class Dialogue:
    """A job with the answers that it has so far."""

    def __init__(self, job: Job, settings: DistillSettings):
        self.conversation, self.turns, self.question = job.conversation, job.turns, job.question
        self.settings, self.arguments = settings, job.arguments
        self.messages: list[Message] = []
        self.answers: list[AnswerTokens] = []
        self.reasons: list[FinishReason | None] = []  # why each answer ended
        self.prompt: list[int] = []  # of the turn that was asked for last
        self.from_text = False  # the ids of some answer were encoded again

    def request(self, number: int, source: AnswerSource) -> ServeRequest | None:
        """The next turn to answer; None after the last, and if its prompt does not fit.

        That is also a prompt that the template refuses after the answers so far.
        """
        turn = len(self.answers)
        if turn == len(self.turns) or self.is_dropped:
            return None
        messages = self.messages + self.turns[turn]
        where = self.conversation.where
        try:
            self.prompt = encode_prompt(source.tokenizer, messages, where, self.arguments)
        except UnusableRowError:
            return None
        if source.max_length is not None and len(self.prompt) >= source.max_length:
            return None
        seed = row_seed(self.settings.seed, self.conversation.id, turn)
        return ServeRequest(self.prompt, number, seed=seed)

    def take(self, given: Answer, source: AnswerSource) -> None:
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
        """Whether its row is not to be written."""
        return self.settings.drop_cut and "length" in self.reasons

    @property
    def is_shortened(self) -> bool:
        """Whether later turns were left out, since they did not fit."""
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
