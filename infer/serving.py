"""The requests of `Decoder.serve`, which come and go, and their answers."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any, TypeAlias

from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.errors import UserError
from drafthead.core.settings import AtLeastOne, checked
from drafthead.infer.request.options import OF_ONE_CALL, read_options
from drafthead.infer.request.prompts import Prompt
from drafthead.infer.request.request import DecodeOptions, Request
from drafthead.infer.request.stopping import FinishReason
from drafthead.infer.request.text_pieces import texts_of
from drafthead.infer.scheduling.tickets import Gain, Ticket


@dataclass(frozen=True)
class ServeRequest:
    """A prompt with its own options; those left out are the options of the call to `serve`."""

    prompt: Prompt
    id: Hashable = None  # comes back with the answer; None: the number of the request, from 0
    max_new_tokens: int | None = None
    seed: int | None = None  # None: the call's seed plus the number of the request
    options: Mapping[str, Any] = field(default_factory=dict)  # any others of `Decoder.generate`


@dataclass(frozen=True)
class Answer:
    """The answer to one request, or its error."""

    id: Hashable
    tokens: list[int] = field(default_factory=list)  # new token ids, the end token included
    text: str = ""  # the same without special tokens; empty without a tokenizer
    finish_reason: FinishReason | None = None  # None with an error
    # Tokens that each step committed, bonus included, before the answer was cut at its end.
    accept_lengths: list[int] = field(default_factory=list)
    error: str | None = None  # why there is no answer, or why it breaks off
    reused: int = 0  # positions of the prompt that were read before, see `Decoder.remember`


def answer_of(gain: Gain, tokenizer: PreTrainedTokenizerBase | None) -> Answer:
    """The answer that a request's row holds once it has ended."""
    row, request = gain.row, gain.ticket.request
    tokens = row.tokens[:-1] if row.failed else row.tokens
    before = request.prefixes or request.prompts
    text = texts_of([tokens], tokenizer, after=before)[0] if tokenizer else ""
    reason = row.finish_reason if gain.error is None else None
    return Answer(gain.ticket.id, tokens, text, reason, row.accept_lengths, gain.error, row.reused)


Requests: TypeAlias = Iterable[ServeRequest | Prompt] | Queue[ServeRequest | Prompt | None]
# The checked form of a request with its number.
Reader: TypeAlias = Callable[[ServeRequest, int], Request]


def shared_options(options: Mapping[str, Any], max_rows: int) -> int:
    """Check the options of a call of `serve`; returns the seed of its first request.

    Raises UserError for an option that cannot be shared, for a list of seeds and for a max_rows
    below 1.
    """
    checked("max_rows", AtLeastOne, max_rows)
    settings = read_options(options)
    refuse_in_serve(options, settings)
    if not isinstance(settings.seed, int):
        raise UserError("serve takes one seed; give each ServeRequest a seed of its own instead")
    return settings.seed


def refuse_in_serve(options: Mapping[str, Any], settings: DecodeOptions) -> None:
    """Raise UserError for an option, of all requests or of one, that rows cannot share a batch by.

    `settings` are the options as they were read, with those of a generation config.
    """
    refuse_of_one_call(options, settings, "serve does not take {}: its requests come one by one")
    if any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in settings.logits_processor):
        raise UserError("serve does not take prefix_allowed_tokens_fn, which counts prompts")


def refuse_of_one_call(options: Mapping[str, Any], settings: DecodeOptions, sentence: str) -> None:
    """Raise UserError, a sentence with the option's name, for one that is about a single call."""
    # These may also come in a generation config.
    read = {
        "num_return_sequences": settings.num_return_sequences > 1,
        "num_beams": settings.beams is not None,
        "max_time": settings.max_time is not None,
    }
    given = {name for name, value in options.items() if value is not None} & OF_ONE_CALL
    if others := given | {name for name, is_set in read.items() if is_set}:
        raise UserError(sentence.format(min(others)))


def own_options(request: ServeRequest, seed: int) -> dict[str, Any]:
    """The options that a request gives for itself, with its seed, by default `seed`."""
    own = {"max_new_tokens": request.max_new_tokens, "seed": request.seed, **request.options}
    return {"seed": seed} | {name: value for name, value in own.items() if value is not None}


class WaitingRequests:
    """The requests that have not been admitted yet, of an iterable or of a queue.

    An iterable is asked for the next request whenever rows are free. A queue is waited for only
    while no row runs; None in it means that no more requests come.
    """

    def __init__(self, requests: Requests, read: Reader):
        """Raises UserError for a string, whose letters would be requests."""
        if isinstance(requests, str):
            raise UserError("serve takes an iterable of prompts, not one prompt: put it in a list")
        self.queue = requests if isinstance(requests, Queue) else None
        self.iterator: Iterator[ServeRequest | Prompt] = (
            iter(()) if isinstance(requests, Queue) else iter(requests)
        )
        self.read = read
        self.taken = 0
        self.ended = False

    def take(self, count: int, wait: bool) -> list[Ticket | Answer]:
        """Up to `count` requests: tickets, and answers to those that cannot be honoured.

        With `wait` a queue's first request is waited for.
        """
        found: list[Ticket | Answer] = []
        while len(found) < count and not self.ended:
            try:
                found.append(self._ticket(self._next(wait and not found)))
            except Empty:
                break
            except StopIteration:
                self.ended = True
        return found

    def _next(self, wait: bool) -> ServeRequest | Prompt:
        """The next request; raises StopIteration after the last, Empty when none is there now."""
        if self.queue is None:
            return next(self.iterator)
        given = self.queue.get(block=wait)
        if given is None:
            raise StopIteration
        return given

    def _ticket(self, given: ServeRequest | Prompt) -> Ticket | Answer:
        """The request in token ids and limits, or the reason why it cannot be answered."""
        request = given if isinstance(given, ServeRequest) else ServeRequest(given)
        number, self.taken = self.taken, self.taken + 1
        name = number if request.id is None else request.id
        try:
            return Ticket(name, self.read(request, number))
        except Exception as error:  # chat templates and tokenizers raise many kinds
            return Answer(name, error=str(error) or type(error).__name__)
