"""What `Decoder.serve` takes and gives: requests, and their answers."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.infer.engine.batch_run import Row, no_token_in
from drafthead.infer.request.prompts import Prompt
from drafthead.infer.request.request import Request
from drafthead.infer.request.stopping import FinishReason, Stop
from drafthead.infer.request.text_pieces import texts_of


@dataclass(frozen=True)
class ServeRequest:
    """A prompt with options of its own; None: those of the call of `serve`."""

    prompt: Prompt
    id: Hashable = None  # comes back with the answer; None: the number of the request, from 0
    max_new_tokens: int | None = None
    seed: int | None = None  # None: the call's seed plus the number of the request
    chat_template_kwargs: Mapping[str, Any] | None = None  # of a prompt that is text or messages
    # Requests that sample alike share batches; others wait until the rows before them have ended.
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_strings: str | Sequence[str] | None = None


@dataclass(frozen=True)
class Answer:
    """The answer to one request, or what is wrong with the request."""

    id: Hashable
    tokens: list[int] = field(default_factory=list)  # new token ids, the end token included
    text: str = ""  # the same without special tokens; empty without a tokenizer
    finish_reason: FinishReason | None = None  # None with an error
    # Tokens that each step committed, bonus included, before the answer was cut at its end.
    accept_lengths: list[int] = field(default_factory=list)
    error: str | None = None  # why there is no answer, or why it breaks off
    reused: int = 0  # positions of the prompt that were read before, see `Decoder.remember`


@dataclass(frozen=True)
class Ticket:
    """A request that was found to be valid, as a batch of one prompt."""

    id: Hashable
    request: Request

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompts[0])

    def answer(self, row: Row, tokenizer: PreTrainedTokenizerBase | None) -> Answer:
        """The answer that the request's row holds once it has ended."""
        tokens, error = row.tokens, None
        if row.failed:
            error, tokens = no_token_in("the prompt", tokens), tokens[:-1]
        text = texts_of([tokens], tokenizer)[0] if tokenizer else ""
        reason = row.finish_reason if error is None else None
        return Answer(self.id, tokens, text, reason, row.accept_lengths, error, row.reused)


def merged(tickets: Sequence[Ticket]) -> Request:
    """The requests, which agree in sampling, end tokens and options of drafts, as one batch."""
    requests = [ticket.request for ticket in tickets]
    first = requests[0]
    return Request(
        prompts=[prompt for each in requests for prompt in each.prompts],
        limits=[limit for each in requests for limit in each.limits],
        sampling=first.sampling,
        seeds=[seed for each in requests for seed in each.seeds],
        end_ids=first.end_ids,
        processors=[processor for each in requests for processor in each.processors],
        stops=stops_of(requests),
        draft_temperature=first.draft_temperature,
        prefill_chunk=first.prefill_chunk,
    )


def stops_of(requests: Sequence[Request]) -> list[Stop]:
    """What may stop each row besides end tokens; an empty list where nothing can."""
    if not any(each.stops for each in requests):
        return []
    return [each.stops[0] if each.stops else Stop((), ()) for each in requests]
