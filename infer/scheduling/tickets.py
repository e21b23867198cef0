"""Requests that are decoded in rows of batches, and what these bring them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers.generation.logits_process import LogitsProcessorList

from drafthead.core.errors import first_line
from drafthead.infer.answers.results import Logprobs
from drafthead.infer.engine.batch_run import BatchRun, Row
from drafthead.infer.request.request import Request
from drafthead.infer.request.stopping import FinishReason, Stop
from drafthead.infer.scheduling.past import Past
from drafthead.infer.verifiers import Verifier, rule_of_rows


@dataclass(eq=False)
class Ticket:
    """A request that was found to be valid, as a batch of one prompt."""

    id: Hashable
    request: Request
    # What the request's own processors and stops have raised: it ends this answer and no other.
    trouble: list[Exception] = field(default_factory=list)
    # While its prompt waits to be read to its end:
    key: Any = None  # prompts are read together that have it in common
    read: int = 0  # positions that were read, here or for an earlier prompt
    past: Past | None = None  # of the part that was read here
    reused: int = 0  # positions of it that had been read for earlier prompts
    state: Any = None  # of the weights that began to read
    speed: float = 0.0  # positions a second, when that was read

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompts[0])

    @property
    def left(self) -> int:
        """Positions of the prompt to read."""
        return self.prompt_length - self.read


class Way(NamedTuple):
    """The options that requests have in common that can be rows of one batch."""

    rule: str  # see `rule_of_rows`
    in_graphs: bool
    processed: bool
    in_form: bool
    end_ids: frozenset[int]
    logprobs: int | None
    rule_options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, request: Request, rule: Verifier) -> "Way":
        """The way in which a request is decoded under a rule."""
        name, in_graphs = rule_of_rows(rule.name, greedy=False), request.samples_in_graphs
        processed, in_form = bool(request.processors), request.in_form
        options = tuple(sorted(request.rule_options.items()))
        return cls(name, in_graphs, processed, in_form, request.end_ids, request.logprobs, options)


@dataclass(frozen=True)
class Gain:
    """An addition of a pass to the answer of one request."""

    ticket: Ticket
    row: Row
    tokens: list[int]
    proposed: int  # tokens that were drafted for the pass
    accepted: int  # and those that it accepted, of which the answer's end may have cut some
    logprobs: Logprobs | None  # of the tokens, where they were asked for
    ended: bool  # whether these are the last ones; `row` may have gone on already
    error: str | None = None  # why the answer breaks off


class GuardedStop(Stop):
    """The stop of one request, which ends its own answer alone where it raises an exception."""

    def __init__(self, ticket: Ticket, stop: Stop):
        super().__init__((), ())
        self.ticket, self.stop = ticket, stop

    def __call__(self, token: int) -> FinishReason | None:
        try:
            return self.stop(token)
        except Exception as error:
            self.ticket.trouble.append(error)
            return "cancelled"


class GuardedProcessors(LogitsProcessorList):
    """The processors of one request, which allow it no token where one raises an exception."""

    def __init__(self, ticket: Ticket, processors: LogitsProcessorList):
        super().__init__(processors)
        self.ticket = ticket

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The processed scores [M, V] after input_ids [M, T]."""
        try:
            return super().__call__(input_ids, scores)  # type: ignore[arg-type]
        except Exception as error:
            self.ticket.trouble.append(error)
            return torch.full_like(scores, -torch.inf)


def batch_of(tickets: Sequence[Ticket], device: torch.device) -> BatchRun:
    """The requests, which have their `Way` in common, as one batch: each row is its ticket's."""
    run = BatchRun(merged(tickets), device)
    for row, ticket in zip(run.rows, tickets, strict=True):
        row.owner, row.sampling = ticket, ticket.request.sampling
        row.drafts = ticket.request.drafts
    return run


def merged(tickets: Sequence[Ticket]) -> Request:
    """The requests as one, but for what each row has of its own."""
    requests = [ticket.request for ticket in tickets]
    stops = [
        GuardedStop(ticket, ticket.request.stops[0]) if ticket.request.stops else Stop((), ())
        for ticket in tickets
    ]
    return replace(
        requests[0],
        prompts=[prompt for each in requests for prompt in each.prompts],
        limits=[limit for each in requests for limit in each.limits],
        seeds=[seed for each in requests for seed in each.seeds],
        processors=[
            GuardedProcessors(ticket, processors)
            for ticket in tickets
            for processors in ticket.request.processors
        ],
        stops=stops if any(each.stops for each in requests) else [],
        prefixes=[prefix for each in requests for prefix in each.prefixes or each.prompts],
    )


def beginning(request: Request, end: int) -> Request:
    """A request to read the first `end` tokens of a prompt, whose next token nobody looks at."""
    prompts = [request.prompts[0][:end]]
    read = replace(request, prompts=prompts, limits=[1], processors=[], stops=[])
    return replace(read, prefixes=None, new_record=None)


def broken_off(tickets: Sequence[Ticket], error: Exception) -> list[Gain]:
    """The ends of answers that an exception has broken off."""
    return [Gain(t, Row(0), [], 0, 0, None, ended=True, error=first_line(error)) for t in tickets]
