"""Requests that come and go: rows join the running batch as others end."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from queue import Empty, Queue
from typing import Any, TypeAlias

import torch
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.heads.sampling import SamplingConfig
from drafthead.infer.engine.batch_run import BatchRun, Emitted, Row, no_token_in
from drafthead.infer.engine.loop import next_step, read_prompts
from drafthead.infer.engine.method import Method
from drafthead.infer.request.options import (
    OF_ONE_CALL,
    DecodeOptions,
    Options,
    Request,
    read_options,
)
from drafthead.infer.request.prompts import Prompt
from drafthead.infer.request.stopping import FinishReason, Stop
from drafthead.infer.request.text_pieces import texts_of
from drafthead.infer.request.values import whole_option
from drafthead.infer.verifiers import verifier_for

MOST_PADDING = 0.25
# Newcomers are let in together, in groups of this part of the rows. On a GPU a pass over prompts
# takes as long as ten steps, and rows that wait cost nothing.
GROUPS, GROUPS_ON_GPU = 16, 4
MOST_METHODS = 32  # ways of sampling whose planners are kept


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


Requests: TypeAlias = Iterable[ServeRequest | Prompt] | Queue[ServeRequest | Prompt | None]
# The checked form of a request with its number.
Reader: TypeAlias = Callable[[ServeRequest, int], Request]


def shared_options(options: DecodeOptions, max_rows: int) -> int:
    """Check the options of a call of `serve`; returns the seed of its first request.

    Raises UserError for an option that cannot be shared, for a verifier that does not fit, for a
    list of seeds and for a max_rows below 1.
    """
    whole_option("max_rows", max_rows)
    settings = read_options(options)
    verifier_for(settings.verifier, settings.sampling.temperature)
    refuse_of_one_call(options, settings, "serve does not take {}: its requests come one by one")
    if any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in settings.logits_processor):
        raise UserError("serve does not take prefix_allowed_tokens_fn, which counts prompts")
    if not isinstance(settings.seed, int):
        raise UserError("serve takes one seed; give each ServeRequest a seed of its own instead")
    return settings.seed


def refuse_of_one_call(options: DecodeOptions, settings: Options, sentence: str) -> None:
    """Raise UserError, a sentence with the option's name, for one that is about a single call."""
    # These may also come in a generation config.
    read = {
        "num_return_sequences": settings.num_return_sequences > 1,
        "num_beams": settings.beams is not None,
        "max_time": settings.max_seconds is not None,
    }
    given = {name for name, value in options.items() if value is not None} & OF_ONE_CALL
    if others := given | {name for name, is_set in read.items() if is_set}:
        raise UserError(sentence.format(min(others)))


def own_options(request: ServeRequest, seed: int) -> DecodeOptions:
    """The options that a request gives for itself, with its seed, by default `seed`."""
    names = [each.name for each in fields(request) if each.name in DecodeOptions.__annotations__]
    own: Any = {name: getattr(request, name) for name in names}
    given: DecodeOptions = {name: value for name, value in own.items() if value is not None}  # type: ignore[assignment]
    return {"seed": seed, **given}


def merged(tickets: Sequence[Ticket]) -> Request:
    """The requests, which agree in all but prompts, limits, seeds and stops, as one batch."""
    requests = [ticket.request for ticket in tickets]
    stops = [each.stops[0] if each.stops else Stop((), ()) for each in requests]
    return replace(
        requests[0],
        prompts=[prompt for each in requests for prompt in each.prompts],
        limits=[limit for each in requests for limit in each.limits],
        seeds=[seed for each in requests for seed in each.seeds],
        processors=[processor for each in requests for processor in each.processors],
        stops=stops if any(each.stops for each in requests) else [],
        prefixes=[prefix for each in requests for prefix in each.prefixes or each.prompts],
    )


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


class ServedRows:
    """Rows at work, and whose answers they are."""

    def __init__(self, method: Method, run: BatchRun, tickets: Sequence[Ticket]):
        """Reads the prompts of `run`, one for each ticket, in one pass."""
        self.method, self.tickets = method, list(tickets)
        self.stepper = method.stepper(run)
        self.session, emitted = read_prompts(self.stepper, method.drafter, method.recall(run))
        self.emitted: Emitted = emitted  # by the last pass

    @property
    def count(self) -> int:
        """Rows whose answers have not ended."""
        return sum(row.active for row in self.stepper.run.batch.running_rows())

    def step(self) -> None:
        """One step of all rows."""
        self.emitted = next_step(self.stepper, self.session, self.method.planner)

    def ended(self, tokenizer: PreTrainedTokenizerBase | None) -> list[Answer]:
        """The answers that ended in the last pass."""
        rows = self.stepper.run.batch.rows
        return [
            self.tickets[number].answer(rows[number], tokenizer)
            for number in self.emitted
            if not rows[number].active
        ]

    def join(self, other: "ServedRows") -> None:
        """Go on with the rows of `other` too; both have some that have not ended."""
        parts = [rows.stepper.run.batch for rows in (self, other)]
        order = seats(*([row.active for row in batch.running_rows()] for batch in parts))
        both = [
            rows.tickets[number]
            for rows, batch in zip((self, other), parts, strict=True)
            for number in batch.running
        ]
        self.tickets = [both[row] for row in order]
        self.session.join_rows(other.session, order)
        self.stepper.join(other.stepper, order)


def seats(old: Sequence[bool], new: Sequence[bool]) -> list[int]:
    """The order in which rows of two batches go on in one, see `RowState.join_rows`.

    Which rows are active is given. New ones take the places of old ones that have ended, so that
    nothing else needs to be moved; if there are more of them, they come after all others. Of
    ``on off on`` and ``on off on`` the order is 0 3 2 5.
    """
    order = list(range(len(old)))
    ended = [place for place, active in enumerate(old) if not active]
    for number, row in enumerate(len(old) + place for place, active in enumerate(new) if active):
        if number < len(ended):
            order[ended[number]] = row
        else:
            order.append(row)
    return order


@torch.no_grad()
def serve(
    waiting: WaitingRequests,
    method_for: Callable[[BatchRun], Method],
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase | None,
    max_rows: int,
) -> Iterator[Answer]:
    """The answers in the order in which they end, of at most `max_rows` rows at a time."""
    methods: dict[SamplingConfig, Method] = {}
    rows: ServedRows | None = None
    held: list[Ticket] = []  # until the running rows, which sample otherwise, have ended
    least = max(1, max_rows // (GROUPS_ON_GPU if device.type == "cuda" else GROUPS))
    while rows is not None or held or not waiting.ended:
        free = max_rows - (rows.count if rows else 0)
        # A pass over few prompts costs more for each of them than one over many.
        found = waiting.take(free if free >= least and not held else 0, wait=rows is None)
        yield from (each for each in found if isinstance(each, Answer))
        tickets = [*held, *(each for each in found if isinstance(each, Ticket))]
        admitted, held = sampled_alike(tickets, rows)
        for group in alike(admitted):
            run = BatchRun(merged(group), device, max_rows)
            sampling = run.request.sampling
            if sampling not in methods:
                methods[sampling] = method_for(run)
                if len(methods) > MOST_METHODS:
                    del methods[next(iter(methods))]
            newcomers = ServedRows(methods[sampling], run, group)
            yield from newcomers.ended(tokenizer)
            rows = together(rows, newcomers)
        if rows is not None:
            rows.step()
            yield from rows.ended(tokenizer)
            rows = rows if rows.count else None


def sampled_alike(
    tickets: Sequence[Ticket], rows: ServedRows | None
) -> tuple[list[Ticket], list[Ticket]]:
    """The tickets that sample as the running rows do, or as the first of them, and the others."""
    if not tickets:
        return [], []
    running = rows.stepper.run.request if rows is not None else tickets[0].request
    fits = [ticket.request.sampling == running.sampling for ticket in tickets]
    pairs = list(zip(tickets, fits, strict=True))
    return [ticket for ticket, fit in pairs if fit], [ticket for ticket, fit in pairs if not fit]


def alike(tickets: Sequence[Ticket]) -> list[list[Ticket]]:
    """Tickets in groups of similar prompts, the longest first, each of which one pass reads.

    Padding is at most `MOST_PADDING` of what the others are: prompts of 90, 80, 40 and 35 tokens
    are read in two passes.
    """
    groups: list[list[Ticket]] = []
    read = padded = 0  # tokens of the last group, without and with padding
    for ticket in sorted(tickets, key=lambda ticket: ticket.prompt_length, reverse=True):
        longest = groups[-1][0].prompt_length if groups else 0
        read, padded = read + ticket.prompt_length, padded + longest
        if not groups or padded > (1 + MOST_PADDING) * read:
            groups.append([])
            read = padded = ticket.prompt_length
        groups[-1].append(ticket)
    return groups


def together(rows: ServedRows | None, newcomers: ServedRows) -> ServedRows | None:
    """All rows that have not ended; None if there are none."""
    if not newcomers.count:
        return rows
    if rows is None:
        return newcomers
    rows.join(newcomers)
    return rows
