"""Sources of the answers of a distillation: a target in this process, or another one.

Answers that loop may be ended. A head learns nothing from loops: prompt lookup drafts them already.
Small models often fall into them when they decode greedily: a third of SmolLM2-135M's answers to
invented prompts did within 320 tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Queue
from typing import Protocol, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteria

from drafthead.core.errors import UserError
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.infer.decoder import Decoder
from drafthead.infer.request.prompts import Prompt
from drafthead.infer.serving import Answer, ServeRequest
from drafthead.train.settings import DistillSettings

# Requests of token ids, with a number as id and a seed; None: no more come.
Questions: TypeAlias = Queue[ServeRequest | Prompt | None]


@dataclass(frozen=True)
class EncodedAnswer(Answer):
    """An answer that came as text alone: its ids were encoded again, and may be other ones."""


class AnswersPrompts(Protocol):
    """A target whose answers are wanted."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    max_length: int | None  # of prompt and answer in tokens; None: unlimited, or not known
    vocab_size: int | None  # tokens that the target has embeddings for; None: not known

    def weights(self) -> str | None:
        """The `weights_fingerprint` of the target; None where it cannot be seen."""


class AnswerSource(AnswersPrompts, Protocol):
    """A target that answers one question after the other."""

    @property
    def ahead(self) -> int:
        """Questions that should wait; with 0 a window begins when the one before is whole."""

    def answers(self, questions: Questions, settings: DistillSettings) -> Iterator[Answer]:
        """The answers in any order, `settings.batch_size` at a time, until None is in the queue.

        Questions may be put into it whenever an answer has been given.
        """


class DecoderSource:
    """A target in this process."""

    ahead = 0  # answers may be rounded by their batch, which a run that resumes has again

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


WINDOW = 32  # tokens
TIMES = 3  # that the last WINDOW tokens occur, the last one included
EVERY = 8  # tokens between two looks


class EndlessRepetition(StoppingCriteria):
    """True where the last `WINDOW` tokens have occurred at least twice before.

    Twice, because an answer may quote its prompt once.
    """

    every = EVERY  # asked for each token of 512 rows, it would take longer than a GPU's step

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor | None, **_: object
    ) -> torch.BoolTensor:
        """For prompts with their answers so far [B, T], which of them repeat themselves [B]."""
        length = input_ids.shape[1]
        if length % EVERY or length < WINDOW + TIMES - 1:
            return torch.zeros(len(input_ids), dtype=torch.bool)  # type: ignore[return-value]
        windows = input_ids.unfold(1, WINDOW, 1)  # [B, T - WINDOW + 1, WINDOW]
        same = (windows == windows[:, -1:]).all(dim=2)
        return same.sum(dim=1) >= TIMES  # type: ignore[return-value]


def without_repetition(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """An answer [T] up to where `EndlessRepetition` would have ended it, or all of it.

    For answers of a server, which knows no such criterion.
    """
    criterion = EndlessRepetition()
    text = torch.tensor([[*prompt, *answer]])
    for length in range(1, len(answer) + 1):
        whole = len(prompt) + length
        if whole % EVERY == 0 and criterion(text[:, :whole], None).all():  # type: ignore[arg-type]
            return list(answer[:length])
    return list(answer)
