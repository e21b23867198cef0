"""Rows at work for requests that come and go: they join batches, end, and leave."""

import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.drafting.drafter import NoDrafter
from drafthead.core.errors import first_line
from drafthead.core.row_state import chosen
from drafthead.core.target.target import Target
from drafthead.infer.answers.score_record import LogprobRecord
from drafthead.infer.engine.batch_run import BatchRun, Emitted, no_token_in
from drafthead.infer.engine.loop import Decoding
from drafthead.infer.engine.prefill import prompt_groups
from drafthead.infer.request.request import Request
from drafthead.infer.scheduling.method import Method
from drafthead.infer.scheduling.past import Memory, Past, longest_of
from drafthead.infer.scheduling.prompt_queue import Prompts
from drafthead.infer.scheduling.tickets import Gain, Ticket, Way, batch_of, beginning, broken_off
from drafthead.infer.serving import Answer, WaitingRequests, answer_of
from drafthead.infer.verifiers import Verifier

logger = logging.getLogger(__name__)

MOST_METHODS = 32  # ways of decoding whose planners are kept
# What a step costs beside the columns that its rows read, in columns of one row. On GPUs it is the
# bytes of the weights over those of a column: 122,000 for Llama 3 8B, 27,000 for Llama 2 7B, 80,000
# for Qwen2 0.5B. CPU kernels read no padding; PyTorch's eager attention does.
STEP_COST, EAGER_STEP_COST = 32768, 1024
COUNTED = 128  # lengths are compared in units of so many columns
# Newcomers are let in together, in groups of this part of the rows. On a GPU a pass over prompts
# takes as long as ten steps, and rows that wait cost nothing.
GROUPS, GROUPS_ON_GPU = 16, 4


class Work(Protocol):
    """Work that is done in turns with other work."""

    used: float  # what its turns have taken, or what others had when it came

    @property
    def count(self) -> int:
        """The amount of work to do: 0 where there is none."""

    def turn(self) -> list[Gain]:
        """Do a part of it; returns what answers have gained."""

    def given_up(self, error: Exception) -> list[Gain]:
        """Do no more of it, after a turn has raised an exception; returns answers' ends."""


class ServedRows(Decoding):
    """Rows of one batch at work, and whose answers they are."""

    def __init__(self, method: Method, run: BatchRun, past: Past | None):
        """Reads the prompts of `batch_of` tickets, after what `past` knows of them."""
        super().__init__(method.stepper(run), method.drafter, method.planner, lambda: past)
        self.way = Way.of(run.rows[0].owner.request, method.rule)
        self.used = 0.0  # seconds of turns, see `RunningRows`
        self.emitted = self.begin()  # by the last pass
        self.state: Any = None  # of the weights that began to read, where rows are kept

    @property
    def count(self) -> int:
        """Rows whose answers have not ended."""
        return sum(row.active for row in self.run.running_rows())

    @property
    def lengths(self) -> list[int]:
        """Tokens of prompt and answer of each row whose answer has not ended, rounded up."""
        rows = [row for row in self.run.running_rows() if row.active]
        return [-(-(row.prompt_length + len(row.tokens)) // COUNTED) * COUNTED for row in rows]

    def suits(self, other: "ServedRows") -> bool:
        """Whether the rows of both are decoded alike, and a step of all costs less than two do."""
        target, both = self.stepper.target, [*self.lengths, *other.lengths]
        is_eager = target.device.type == "cpu" and not target.backend.has_kernels
        cost = EAGER_STEP_COST if is_eager else STEP_COST
        return self.way == other.way and len(prompt_groups(both, cost)) == 1

    def drafts_like(self, other: "ServedRows") -> bool:
        """Whether sessions are of one drafter: another one may have taken its place meanwhile."""
        drafters = {rows.drafter for rows in (self, other)}
        return len(drafters) == 1 or all(isinstance(each, NoDrafter) for each in drafters)

    def turn(self) -> list[Gain]:
        """One step of all rows; returns what it has added to their answers."""
        self.step()
        return self.gains()

    def given_up(self, error: Exception) -> list[Gain]:
        """The ends of all answers that have not ended, after an exception in a step of all rows."""
        tickets = [row.owner for row in self.run.rows if row.active]
        self.run.end("cancelled")
        return broken_off(tickets, error)

    def step(self) -> Emitted:
        """One step of all rows."""
        self.stepper.fill_up(self.session)
        self.emitted = super().step()
        return self.emitted

    def gains(self) -> list[Gain]:
        """The tokens that the last pass has added to each answer."""
        return [self._gain(*each) for each in self.emitted.items()]

    def _gain(self, number: int, tokens: list[int]) -> Gain:
        """The tokens that the last pass has added to the answer of row `number`."""
        run = self.run
        row, record, logprobs = run.rows[number], run.record, None
        if isinstance(record, LogprobRecord):
            logprobs = record.part(number, len(row.tokens) - len(tokens), len(tokens))
        accepted = row.accept_lengths[-1] - 1 if row.accept_lengths else 0
        ticket, ended, error = row.owner, not row.active, None
        if row.failed or (ticket.trouble and row.finish_reason == "cancelled"):
            trouble = ticket.trouble
            error = first_line(trouble[-1]) if trouble else no_token_in("the prompt", row.tokens)
        return Gain(ticket, row, tokens, row.drafted, accepted, logprobs, ended, error)

    def keep(self, memory: Memory, state: Any) -> None:
        """From now on keep in a memory what was read for rows that end, by weights in `state`."""
        self.state = state

        def kept(places: Sequence[int]) -> None:
            """Keep what was read for the rows at these places, but for those that failed."""
            run, cache = self.run, self.stepper.cache
            for place in places:
                answer = run.rows[run.running[place]]
                ticket = answer.owner
                if answer.failed or ticket.trouble:
                    continue
                tokens = [*ticket.request.prompts[0], *answer.tokens]
                row = torch.tensor([place], device=self.stepper.target.device)
                salt = ticket.request.cache_salt
                try:
                    session = chosen(self.session, row)
                    past = Past(chosen(cache, row), session, tokens, salt, self.drafter)
                    memory.keep(past, self.state)
                except Exception:  # the answer itself is whole
                    logger.exception("an answer cannot be kept for prompts that go on with it")

        self.stepper.before_end = kept

    def cancel(self, ids: Collection[Hashable]) -> None:
        """End the answers to some requests as they are."""
        for row in self.run.rows:
            if row.active and row.owner.id in ids:
                row.finish_reason = "cancelled"

    def take_over(self, other: "ServedRows") -> None:
        """Go on with the rows of `other` too; both have some that have not ended."""
        runs = self.run, other.run
        order = seats(*([row.active for row in run.running_rows()] for run in runs))
        if self.state != other.state:  # weights have changed: what they read is no one state's
            self.state = object()
        self.session.join_rows(other.session, order)
        self.stepper.join(other.stepper, order)


class RunningRows:
    """Rows at work on requests of all kinds.

    Those that are decoded alike and are about as long make one batch. Batches and the passes over
    prompts take turns by time: what has had the least goes on, so no request waits until others
    have ended, and a long one pays with its own time.
    """

    def __init__(
        self,
        method_for: Callable[[BatchRun], Method],
        rule_for: Callable[[Request], Verifier],
        target: Target,
        max_rows: int,
        memory: Memory,
    ):
        """`memory` is what prompts may begin with."""
        self.method_for, self.rule_for, self.target = method_for, rule_for, target
        self.max_rows, self.memory = max_rows, memory
        self.methods: dict[Way, Method] = {}
        self.prompts = Prompts(target, self._read)
        self.batches: list[ServedRows] = []
        self.others: list[Work] = []  # whatever else the thread has to do
        self.ready: list[Work] = []  # what had something to do at the last turn
        self.now = 0.0  # what these have had of time; others begin with it

    def go_on_with(self, other: "RunningRows") -> None:
        """Decode requests from now on as `other` would; those at work go on as they began."""
        self.method_for, self.rule_for, self.memory = other.method_for, other.rule_for, other.memory
        self.methods = {}
        unread, self.prompts.unread = self.prompts.unread, []
        # Parts were read for the old drafter.
        self.admit([Ticket(each.id, each.request) for each in unread])

    @property
    def count(self) -> int:
        """Rows whose answers have not ended, also those whose prompts are still unread."""
        return len(self.prompts.unread) + sum(rows.count for rows in self.batches)

    def admit(self, tickets: Sequence[Ticket]) -> None:
        """Let requests have rows; their prompts are read in the next turns."""
        for ticket in tickets:
            salt = ticket.request.cache_salt
            ticket.read, past = longest_of(self.memory.known(salt), ticket.request.prompts)
            ticket.key = self._way(ticket), salt, id(past)
        self.prompts.unread += tickets

    @torch.no_grad()
    def step(self) -> list[Gain]:
        """One turn: a pass over prompts or a step of a batch; returns what answers have gained.

        An answer whose turn raises an exception ends with it, and so do those of its batch.
        """
        known: list[Work] = [*self.batches, self.prompts, *self.others]
        before, self.ready = self.ready, [each for each in known if each.count]
        if not self.ready:
            return []
        for each in self.ready:
            each.used = each.used if each in before else max(each.used, self.now)
        self.prompts.alone = self.ready == [self.prompts]
        turns = min(self.ready, key=lambda each: each.used)
        self.now, began = turns.used, perf_counter()
        try:
            gains = turns.turn()
        except Exception as error:
            logger.exception("the running answers end with an error")
            gains = turns.given_up(error)
        # Processes that share a target must all choose the same, which no clock makes sure of.
        turns.used += 1 if self.target.is_shared else perf_counter() - began
        if any(gain.ended for gain in gains) or turns is self.prompts:
            gains += self._regrouped()
        return gains

    def _read(self, tickets: Sequence[Ticket], end: int | None) -> tuple[list[Gain], bool]:
        """Read prompts, see `Prompts`; rows whose prompts are read make a batch."""
        run = batch_of(tickets, self.target.device)
        method, first = self._method(run, self._way(tickets[0])), tickets[0]
        past = first.past or method.recall(run)
        known = 0 if past is None else past.cache.longest
        if known < min(each.read for each in tickets) or (end is not None and known > first.read):
            for each in tickets:
                each.read = known
            return [], False
        if first.past is None:
            first.reused, first.state = known, self.memory.state()
        if end is not None:
            first.past = method.read(
                BatchRun(beginning(run.request, end), self.target.device), past
            )
            # What is known of a position may depend on the token after it.
            first.read = first.past.cuttable(end - 1)
            if first.read:
                first.past.cut(first.read)
                return [], False
            first.past, first.reused, past = None, 0, None  # no part can be kept: read all at once
        newcomers = ServedRows(method, run, past)
        first.past = None  # or its caches would be held for as long as the answer is decoded
        run.reuse(first.reused)
        if self.memory.most_kept:
            newcomers.keep(self.memory, first.state)
        self.batches.append(newcomers)
        return newcomers.gains(), True

    def _way(self, ticket: Ticket) -> Way:
        """The way in which a request is decoded."""
        return Way.of(ticket.request, self.rule_for(ticket.request))

    def _method(self, run: BatchRun, way: Way) -> Method:
        """The method of requests that have a way in common."""
        if way not in self.methods:
            self.methods[way] = self.method_for(run)
            if len(self.methods) > MOST_METHODS:
                del self.methods[next(iter(self.methods))]
        return self.methods[way]

    def cancel(self, ids: Collection[Hashable]) -> list[Gain]:
        """End the answers to some requests as they are; their rows are free.

        Returns the ends of others, where these cannot go on together.
        """
        self.prompts.cancel(ids)
        for rows in self.batches:
            rows.cancel(ids)
        return self._regrouped()

    def _regrouped(self) -> list[Gain]:
        """Forget batches whose answers have all ended, and join those that cost less as one.

        Returns the ends of answers in batches that could not be joined.
        """
        found: list[ServedRows] = []
        lost: list[Gain] = []
        for rows in self.batches:
            fitting = (each for each in found if rows.count and each.suits(rows))
            other = next((each for each in fitting if each.drafts_like(rows)), None)
            try:
                if other is not None:
                    other.take_over(rows)
                elif rows.count:
                    found.append(rows)
            except Exception as error:
                logger.exception("two batches cannot be joined, and are given up")
                lost += [gain for each in (other, rows) if each for gain in each.given_up(error)]
        self.batches = [rows for rows in found if rows.count]
        return lost


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


def newcomers_at_least(max_rows: int, device: torch.device) -> int:
    """The number of rows that must be free before requests that wait are let in."""
    return max(1, max_rows // (GROUPS_ON_GPU if device.type == "cuda" else GROUPS))


def serve(
    waiting: WaitingRequests,
    rows: RunningRows,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Iterator[Answer]:
    """The answers in the order in which they end."""
    least = newcomers_at_least(rows.max_rows, rows.target.device)
    while rows.count or not waiting.ended:
        free = rows.max_rows - rows.count
        # A pass over few prompts costs more for each of them than one over many.
        found = waiting.take(free if free >= least else 0, wait=not rows.count)
        yield from (each for each in found if isinstance(each, Answer))
        rows.admit([each for each in found if isinstance(each, Ticket)])
        for gain in rows.step():
            if gain.ended:
                yield answer_of(gain, tokenizer)
