"""Who answers the prompts of a distillation: a target in this process, or another source."""

from collections.abc import Iterator
from dataclasses import dataclass
from queue import Queue
from typing import Protocol, TypeAlias

from transformers import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.infer import Decoder
from drafthead.infer.request.prompts import Prompt
from drafthead.infer.serving.serve_request import Answer, ServeRequest
from drafthead.train.distillation.repetition import EndlessRepetition
from drafthead.train.distillation.settings import DistillSettings
from drafthead.train.jobs.weights import weights_fingerprint

# Requests of token ids, with a number as id and a seed; None: no more come.
Questions: TypeAlias = Queue[ServeRequest | Prompt | None]


@dataclass(frozen=True)
class EncodedAnswer(Answer):
    """An answer that came as text alone: its ids were encoded again, and may be other ones."""


class AnswerSource(Protocol):
    """A target that answers prompts."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    max_length: int | None  # of prompt and answer in tokens; None: unlimited, or not known
    vocab_size: int | None  # tokens that the target has embeddings for; None: not known

    def weights(self) -> str | None:
        """The `weights_fingerprint` of the target; None where it cannot be seen."""

    def answers(self, questions: Questions, settings: DistillSettings) -> Iterator[Answer]:
        """The answers in any order, `settings.batch_size` at a time, until None is in the queue.

        Questions may be put into it whenever an answer has been given.
        """


class DecoderSource:
    """A target in this process."""

    def __init__(self, decoder: Decoder):
        """Raises UserError for a target without a tokenizer."""
        if decoder.tokenizer is None:
            raise UserError("the target has no tokenizer, so prompts cannot be written for it")
        self.decoder, self.tokenizer = decoder, decoder.tokenizer
        self.end_ids, self.max_length = frozenset(decoder.end_ids), decoder.max_length
        self.vocab_size: int | None = decoder.target.vocab_size

    def weights(self) -> str | None:
        """The `weights_fingerprint` of the target."""
        return weights_fingerprint(self.decoder.target)

    def answers(self, questions: Questions, settings: DistillSettings) -> Iterator[Answer]:
        """The answers, in the order in which they end."""
        return self.decoder.serve(
            questions,
            max_rows=settings.batch_size,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            stopping_criteria=[EndlessRepetition()] if settings.end_repetition else [],
        )
