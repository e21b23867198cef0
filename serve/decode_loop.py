"""The thread that owns the running rows: takes requests in, hands pieces of answers out."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from threading import Condition, Thread

from drafthead.core.errors import first_line
from drafthead.infer import Decoder
from drafthead.infer.answers.results import Logprobs
from drafthead.infer.answers.score_record import scored_prompt
from drafthead.infer.request.request import Request
from drafthead.infer.scheduling.past import LEAST_SHARE
from drafthead.infer.scheduling.running_rows import RunningRows, newcomers_at_least
from drafthead.infer.scheduling.tickets import Gain, Ticket
from drafthead.serve.answer_text import AnswerText
from drafthead.serve.errors import ApiError
from drafthead.serve.metrics import AnswerMetrics, Metrics
from drafthead.serve.recording import Recorder, Source
from drafthead.serve.waiting import Line, Queue, Visit

logger = logging.getLogger(__name__)
NUMBERS = count()
REUSE_STEP = 128  # tokens, as OpenAI reports them
# OpenAI's words for our reasons to end.
REASONS = {"end_token": "stop", "stop_string": "stop", "length": "length"}


@dataclass(frozen=True)
class Piece:
    """The part of an answer that a pass has added, as a client sees it."""

    parts: list[tuple[str, bool]]  # texts, drafted or not
    tokens: list[int]
    logprobs: Logprobs | None
    places: list[int]  # where the text of each token begins, but for an end token
    finish_reason: str | None

    @property
    def text(self) -> str:
        """The text, drafted or not."""
        return "".join(part for part, _ in self.parts)


class Inbox:
    """Pieces of a response's answers, on their way from the decoding thread to the client's task.

    Made in the event loop of that task.
    """

    def __init__(self, client: str = "", salt: str = ""):
        """`salt` is of all requests of the client's key."""
        self.client, self.salt, self.loop = client, salt, asyncio.get_running_loop()
        self.pieces: asyncio.Queue[tuple[int, Piece | ApiError]] = asyncio.Queue()


@dataclass(eq=False)
class Job:
    """One answer that a client waits for."""

    request: Request
    inbox: Inbox
    text: AnswerText
    metrics: AnswerMetrics
    choice: int = 0  # its number in the response
    prompt: int = 0  # number of its prompt in the response
    id: int = field(default_factory=lambda: next(NUMBERS))
    reused: int = 0  # tokens of the prompt that were read before
    thinks: bool | None = False  # see `Form`
    source: Source | None = None  # where the answer may be recorded
    visit: Visit | None = None

    @property
    def size(self) -> int:
        """Most tokens that are read and written for it."""
        return len(self.request.prompts[0]) + self.request.limits[0]


class Scorings:
    """Prompts whose tokens are scored one after the other, a part in each turn."""

    def __init__(self) -> None:
        self.used = 0.0  # seconds of turns, see `RunningRows`
        self.waiting = deque[tuple[Generator[None, None, Logprobs], asyncio.Future[Logprobs]]]()

    @property
    def count(self) -> int:
        """Prompts that are not scored to their ends."""
        return len(self.waiting)

    def turn(self) -> list[Gain]:
        """Score a part of the first prompt, unless nobody waits for it any more."""
        passes, found = self.waiting[0]
        try:
            if not found.done():
                next(passes)
                return []
            self.waiting.popleft()
        except StopIteration as end:
            self._settle(partial(found.set_result, end.value))
        return []

    def given_up(self, error: Exception) -> list[Gain]:
        """Give up the first prompt, which has raised an exception."""
        self._settle(partial(self.waiting[0][1].set_exception, failed(first_line(error))))
        return []

    def _settle(self, settle: Callable[[], None]) -> None:
        """End the first prompt in the event loop of the client's task."""
        _, found = self.waiting.popleft()
        with suppress(RuntimeError):  # the loop is closed
            found.get_loop().call_soon_threadsafe(lambda: None if found.done() else settle())


def failed(error: str) -> ApiError:
    """The error that a client gets whose answer has failed."""
    return ApiError(500, f"decoding failed: {error}")


class DecodeLoop:
    """Decodes what is submitted, up to `max_rows` answers at a time, in a thread of its own.

    What fails ends the answer that it belongs to and no other; the thread goes on whatever happens.
    """

    def __init__(self, decoder: Decoder, metrics: Metrics, max_rows: int, queue: Queue):
        self.decoder, self.target = decoder, decoder.target
        least = newcomers_at_least(max_rows, decoder.target.device)
        self.line, self.scoring = Line(queue, max_rows, spare_rows(max_rows), least), Line(queue, 1)
        self.max_rows = max_rows + spare_rows(max_rows)
        self.scorings = Scorings()
        self.rows = self._new_rows()
        self.newcomers: list[Job] = []  # answers that have a row from now on
        self.gone: set[int] = set()  # answers that nobody waits for any more
        self.running: dict[int, Job] = {}
        metrics.running.set_function(lambda: len(self.running))
        metrics.waiting.set_function(lambda: queue.count)
        self.recorder: Recorder | None = None
        self.stopping = False
        self.next: Decoder | None = None  # which takes the place of the decoder at the next turn
        self.changed = Condition()
        self.thread = Thread(target=self._run, name="decoding", daemon=True)

    def _new_rows(self) -> RunningRows:
        """Rows of which none is at work."""
        rows = self.decoder.running_rows(self.max_rows)
        rows.others.append(self.scorings)
        return rows

    @property
    def is_alive(self) -> bool:
        """Whether anything is decoded."""
        return self.thread.is_alive()

    def go_on_with(self, decoder: Decoder) -> None:
        """Decode requests from now on with a decoder of the same target."""
        decoder.memory.most_kept = self.decoder.memory.most_kept
        decoder.memory.most_bytes = self.decoder.memory.most_bytes
        with self.changed:
            self.next = decoder

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue answers; raises ApiError 429 when too many wait."""
        if not self.is_alive:
            raise ApiError(503, "the decoding thread has ended: the server has to be started again")
        for job in jobs:
            begin, give_up = partial(self._begin, job), partial(self._give_up, job)
            job.visit = Visit(job.inbox.client, job.size, begin, give_up)
        self.line.enter([job.visit for job in jobs if job.visit is not None])

    def _begin(self, job: Job) -> None:
        """Let an answer have a row."""
        with self.changed:
            self.newcomers.append(job)
            self.changed.notify()

    def _give_up(self, job: Job, error: ApiError) -> None:
        """Tell a client that its answer does not come."""
        if job.visit not in (*self.line.waiting, *self.line.inside):  # late: it has left already
            job.metrics.end("abort")
        job.inbox.pieces.put_nowait((job.id, error))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Decode these answers no further."""
        with self.changed:
            self.gone |= {job.id for job in jobs}
            self.changed.notify()
        for job in jobs:
            if job.visit is not None and self.line.leave(job.visit):
                job.metrics.end("abort")

    async def score(self, job: Job, top: int) -> Logprobs:
        """Score the tokens of a prompt with the target; raises ApiError as `Line.place`."""
        prompt = job.request.prompts[0]
        async with self.scoring.place(job.inbox.client, len(prompt)) as visit:
            found = asyncio.get_running_loop().create_future()
            visit.give_up = lambda error: None if found.done() else found.set_exception(error)
            with self.changed:
                self.scorings.waiting.append((scored_prompt(self.target, prompt, top), found))
                self.changed.notify()
            return await found

    def end(self, error: ApiError) -> int:
        """Give up all answers, and scores of prompts; returns how many answers there were."""
        self.scoring.end(error)
        return self.line.end(error)

    def stop(self) -> None:
        """End the thread after its turn."""
        with self.changed:
            self.stopping = True
            self.changed.notify()
        self.thread.join()

    def _run(self) -> None:
        while not self.stopping:
            try:
                self._turn()
            except BaseException as error:  # nobody else would answer the requests that come
                logger.exception("decoding failed; all running answers end with an error")
                self.rows = self._new_rows()
                for job in [*self.running.values()]:
                    self._fail(job, failed(first_line(error)))

    def _turn(self) -> None:
        """Wait for something to do, and do a part of it."""
        with self.changed:
            while not (self.newcomers or self.running or self.scorings.count or self.stopping):
                self.changed.wait()
            if self.stopping:
                return
            newcomers, self.newcomers = self.newcomers, []
            self.running |= {job.id: job for job in newcomers}
            gone, self.gone = self.gone & self.running.keys(), set()
            ended = [self.running.pop(number) for number in gone]
            decoder, self.next = self.next, None
        if decoder is not None:
            self.decoder = decoder
            self.rows.go_on_with(decoder.running_rows(self.max_rows))
        if gone:
            self._free(gone)
            for job in ended:
                job.metrics.end("abort")
        for job in newcomers:
            if job.id not in gone:
                self._admit(job)
        for gain in self.rows.step():
            self._deliver(gain)
        if self.running and not self.rows.count:
            raise RuntimeError("answers have lost their rows")

    def _admit(self, job: Job) -> None:
        """Let an answer begin."""
        try:
            self.rows.admit([Ticket(job.id, job.request)])
        except Exception as error:
            logger.exception("an answer cannot begin")
            self._fail(job, failed(first_line(error)))

    def _free(self, ids: Collection[int]) -> None:
        """Free the rows of answers that are not wanted any more."""
        try:
            for gain in self.rows.cancel(ids):
                self._deliver(gain)
        except Exception:  # they run to their ends, which nobody hears of
            logger.exception("rows cannot be freed")

    def _fail(self, job: Job, error: ApiError) -> None:
        """End one answer with an error."""
        with self.changed:
            self.running.pop(job.id, None)
        job.metrics.end("error")
        self._hand_over(job, error, ended=True)

    def _deliver(self, gain: Gain) -> None:
        """Send what an answer has gained; one that cannot be sent ends with an error."""
        job = self.running.get(gain.ticket.id)  # type: ignore[call-overload]  # ids are those of jobs
        if job is None:  # nobody waits for it any more
            return
        try:
            if gain.error is not None:
                self._fail(job, failed(gain.error))
            else:
                self._send(job, gain)
        except Exception as error:
            logger.exception("what an answer has gained cannot be sent")
            self._fail(job, failed(first_line(error)))
            if not gain.ended:
                self._free({job.id})

    def _send(self, job: Job, gain: Gain) -> None:
        """Send what an answer has gained."""
        if not job.text.drafted:
            length = len(job.request.prompts[0])
            job.reused = reported_reuse(gain.row.reused, length)
            job.metrics.note_prompt(length, job.reused)
        job.metrics.note(len(gain.tokens), gain.proposed, gain.accepted)
        drafted = [place < gain.accepted for place in range(len(gain.tokens))]
        first = len(job.text.drafted)
        parts = job.text.show(drafted, gain.ended)
        reason = None
        if gain.ended:
            reason = REASONS.get(str(gain.row.finish_reason), "stop")
            job.metrics.end(reason)
            with self.changed:
                del self.running[job.id]
            if self.recorder is not None and job.source is not None:
                ends = str(gain.row.finish_reason)
                self.recorder.note(job.source, job.request, gain.row.tokens, ends)
        piece = Piece(parts, gain.tokens, gain.logprobs, job.text.places[first:], reason)
        self._hand_over(job, piece, gain.ended)

    def _hand_over(self, job: Job, piece: Piece | ApiError, ended: bool) -> None:
        """Let the client's task have a piece; the row of an answer that has ended is free."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            job.inbox.loop.call_soon_threadsafe(job.inbox.pieces.put_nowait, (job.id, piece))
            if ended and job.visit is not None:
                job.inbox.loop.call_soon_threadsafe(self.line.leave, job.visit)


def spare_rows(max_rows: int) -> int:
    """Return the number of rows beside, for clients that have none."""
    return max(1, max_rows // 4)


def reported_reuse(reused: int, length: int) -> int:
    """Return the number of tokens of a prompt that are reported as read before.

    It depends on whole steps alone: whether a single token was known would tell what others have
    sent, and so would whether the known share sufficed to be reused.
    """
    whole = reused // REUSE_STEP * REUSE_STEP
    return whole if whole >= LEAST_SHARE * length else 0
