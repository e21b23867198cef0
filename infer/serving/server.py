"""Requests that come and go: rows join the running batch as others end."""

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.sampling import SamplingConfig
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.engine.loop import next_step, read_prompts
from drafthead.infer.engine.method import Method
from drafthead.infer.serving.serve_request import Answer, Ticket, merged
from drafthead.infer.serving.waiting import WaitingRequests

MOST_PADDING = 0.25
# Newcomers are let in together, in groups of this part of the rows. On a GPU a pass over prompts
# takes as long as ten steps, and rows that wait cost nothing.
GROUPS, GROUPS_ON_GPU = 16, 4
MOST_METHODS = 32  # ways of sampling whose planners are kept
MethodFor = Callable[[BatchRun], Method]  # how requests like those of a batch are decoded


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
    method_for: MethodFor,
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
