"""Rows at work for requests that come and go: they join batches, end, and leave."""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from drafthead.heads.drafting.row_state import chosen
from drafthead.heads.sampling import SamplingConfig
from drafthead.infer.answers.results import Logprobs
from drafthead.infer.answers.score_record import LogprobRecord
from drafthead.infer.engine.batch_run import BatchRun, Emitted, Row
from drafthead.infer.engine.loop import next_step, read_prompts
from drafthead.infer.method import Method
from drafthead.infer.past import Memory, Past, longest_of
from drafthead.infer.request.request import Request
from drafthead.infer.request.stopping import Stop

MOST_PADDING = 0.25
MOST_METHODS = 32  # ways of sampling whose planners are kept


@dataclass(frozen=True)
class Ticket:
    """A request that was found to be valid, as a batch of one prompt."""

    id: Hashable
    request: Request

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompts[0])


class Way(NamedTuple):
    """What requests have in common that can be rows of one batch."""

    sampling: SamplingConfig
    end_ids: frozenset[int]
    processed: bool
    top_logprobs: int | None

    @classmethod
    def of(cls, request: Request) -> "Way":
        """How a request is decoded."""
        processed = bool(request.processors)
        return cls(request.sampling, request.end_ids, processed, request.top_logprobs)


@dataclass(frozen=True)
class Gain:
    """What a pass has added to the answer of one request."""

    ticket: Ticket
    row: Row
    tokens: list[int]
    proposed: int  # tokens that were drafted for the pass
    accepted: int  # and those that it accepted, of which the answer's end may have cut some
    logprobs: Logprobs | None  # of the tokens, where they were asked for
    ended: bool  # whether these are the last ones; `row` may have gone on already


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


class ServedRows:
    """Rows of one batch at work, and whose answers they are."""

    def __init__(self, method: Method, run: BatchRun, tickets: Sequence[Ticket]):
        """Reads the prompts of `run`, one for each ticket, in one pass."""
        self.method, self.tickets = method, list(tickets)
        self.stepper = method.stepper(run)
        self.session, emitted = read_prompts(self.stepper, method.drafter, method.recall(run))
        self.emitted: Emitted = emitted  # by the last pass
        self.proposed = 0  # tokens for each row, in the last pass
        self.state: Any = None  # of the weights that began to read, where rows are kept

    @property
    def count(self) -> int:
        """Rows whose answers have not ended."""
        return sum(row.active for row in self.stepper.run.batch.running_rows())

    def step(self) -> None:
        """One step of all rows."""
        stats = self.stepper.run.stats
        before = stats.verified_nodes
        self.emitted = next_step(self.stepper, self.session, self.method.planner)
        self.proposed = stats.verified_nodes - before - 1

    def gains(self) -> list[Gain]:
        """What the last pass has added to each answer."""
        return [self._gain(*each) for each in self.emitted.items()]

    def _gain(self, number: int, tokens: list[int]) -> Gain:
        """What the last pass has added to the answer of row `number`."""
        run = self.stepper.run
        row, record, logprobs = run.batch.rows[number], run.record, None
        if isinstance(record, LogprobRecord):
            logprobs = record.part(number, len(row.tokens) - len(tokens), len(tokens))
        accepted = row.accept_lengths[-1] - 1 if row.accept_lengths else 0
        ticket, ended = self.tickets[number], not row.active
        return Gain(ticket, row, tokens, self.proposed, accepted, logprobs, ended)

    def keep(self, memory: Memory) -> None:
        """From now on keep in a memory what was read for rows that end."""

        self.state = memory.state()

        def kept(places: Sequence[int]) -> None:
            """Keep what was read for the rows at these places."""
            run, cache = self.stepper.run, self.stepper.cache
            for place in places:
                number = run.batch.running[place]
                tokens = [*self.tickets[number].request.prompts[0], *run.batch.rows[number].tokens]
                row = torch.tensor([place], device=self.stepper.target.device)
                past = Past(chosen(cache, row), chosen(self.session, row), tokens)
                memory.keep(past, self.state)

        self.stepper.before_end = kept

    def cancel(self, ids: Collection[Hashable]) -> None:
        """End the answers to some requests as they are."""
        for ticket, row in zip(self.tickets, self.stepper.run.batch.rows, strict=True):
            if ticket.id in ids and row.active:
                row.finish_reason = "cancelled"

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
        if self.state != other.state:  # weights have changed: what they read is no one state's
            self.state = object()
        self.session.join_rows(other.session, order)
        self.stepper.join(other.stepper, order)


class RunningRows:
    """Rows at work on requests of all kinds.

    Those that are decoded alike make one batch. Several batches take turns, a step each, so no
    request waits until others have ended.
    """

    def __init__(
        self,
        method_for: Callable[[BatchRun], Method],
        device: torch.device,
        max_rows: int,
        memory: Memory,
    ):
        """`memory` is what prompts may begin with."""
        self.method_for, self.device, self.max_rows = method_for, device, max_rows
        self.memory = memory
        self.methods: dict[Way, Method] = {}
        self.batches: dict[Way, ServedRows] = {}

    @property
    def count(self) -> int:
        """Rows whose answers have not ended."""
        return sum(rows.count for rows in self.batches.values())

    @torch.no_grad()
    def admit(self, tickets: Sequence[Ticket]) -> list[Gain]:
        """Read the prompts of requests; returns their first tokens.

        Prompts that begin with the same remembered one are read together.
        """
        groups: dict[object, list[Ticket]] = defaultdict(list)
        known = self.memory.known()
        for ticket in tickets:
            _, past = longest_of(known, ticket.request.prompts)
            groups[Way.of(ticket.request), id(past)].append(ticket)
        return [
            gain
            for group in groups.values()
            for similar in alike(group)
            for gain in self._read(similar)
        ]

    def _read(self, tickets: Sequence[Ticket]) -> list[Gain]:
        """Read prompts of similar length, of requests that are decoded alike."""
        way = Way.of(tickets[0].request)
        run = BatchRun(merged(tickets), self.device, rows_fail_alone=True)
        if way not in self.methods:
            self.methods[way] = self.method_for(run)
            if len(self.methods) > MOST_METHODS:
                del self.methods[next(iter(self.methods))]
        newcomers = ServedRows(self.methods[way], run, tickets)
        if self.memory.most_kept:
            newcomers.keep(self.memory)
        gains = newcomers.gains()
        if newcomers.count and way in self.batches:
            self.batches[way].join(newcomers)
        elif newcomers.count:
            self.batches[way] = newcomers
        return gains

    @torch.no_grad()
    def step(self) -> list[Gain]:
        """One step of each batch; returns what it has added to the answers."""
        gains = []
        for rows in self.batches.values():
            rows.step()
            gains += rows.gains()
        self._drop_ended()
        return gains

    def cancel(self, ids: Collection[Hashable]) -> None:
        """End the answers to some requests as they are; their rows are free."""
        for rows in self.batches.values():
            rows.cancel(ids)
        self._drop_ended()

    def _drop_ended(self) -> None:
        """Forget batches whose answers have all ended."""
        self.batches = {way: rows for way, rows in self.batches.items() if rows.count}


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
