"""The thread that owns the running rows: takes requests in, hands pieces of answers out."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from threading import Condition, Thread
from typing import Any

from drafthead.infer import Decoder
from drafthead.infer.answers.results import Logprobs
from drafthead.infer.answers.score_record import prompt_logprobs
from drafthead.infer.engine.batch_run import no_token_in
from drafthead.infer.request.request import Request
from drafthead.infer.running_rows import Gain, Ticket
from drafthead.infer.serving import newcomers_at_least
from drafthead.serve.answer_text import AnswerText
from drafthead.serve.errors import ApiError
from drafthead.serve.metrics import AnswerMetrics, Metrics

logger = logging.getLogger(__name__)
NUMBERS = count()
REUSE_STEP = 128  # tokens, as OpenAI reports them
# OpenAI's words for our reasons to end.
REASONS = {"end_token": "stop", "stop_string": "stop", "length": "length"}


@dataclass(frozen=True)
class Piece:
    """What a pass has added to an answer, as a client sees it."""

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

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.pieces: asyncio.Queue[tuple[int, Piece | ApiError]] = asyncio.Queue()

    def put(self, job: int, piece: Piece | ApiError) -> None:
        """Hand over a piece of an answer; called by the decoding thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, (job, piece))


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

    def send(self, piece: Piece | ApiError) -> None:
        """Hand over a piece; called by the decoding thread."""
        self.inbox.put(self.id, piece)


class DecodeLoop:
    """Decodes what is submitted, up to `max_rows` answers at a time, in a thread of its own."""

    def __init__(self, decoder: Decoder, metrics: Metrics, max_rows: int, max_queue: int):
        self.rows = decoder.running_rows(max_rows)
        self.max_queue, self.target = max_queue, decoder.target
        self.least = newcomers_at_least(max_rows, decoder.target.device)
        self.waiting: deque[Job] = deque()
        self.gone: set[int] = set()  # answers that nobody waits for any more
        self.calls: deque[Callable[[], None]] = deque()
        self.running: dict[int, Job] = {}
        metrics.running.set_function(lambda: len(self.running))
        metrics.waiting.set_function(lambda: len(self.waiting))
        self.stopping = False
        self.changed = Condition()
        self.thread = Thread(target=self._run, name="decoding", daemon=True)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue answers; raises ApiError 429 when too many wait."""
        with self.changed:
            free = self.rows.max_rows - len(self.running)
            if len(self.waiting) + len(jobs) > self.max_queue + free:
                raise ApiError(
                    429,
                    f"{len(self.waiting)} answers wait and {len(jobs)} more are asked for, but the "
                    f"queue holds {self.max_queue}: try again later",
                )
            self.waiting.extend(jobs)
            self.changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Decode these answers no further."""
        with self.changed:
            ids = {job.id for job in jobs}
            self.waiting = deque(job for job in self.waiting if job.id not in ids)
            self.gone |= ids & self.running.keys()
            self.changed.notify()

    async def call(self, function: Callable[[], Any]) -> Any:
        """What a function returns that the decoding thread calls between two steps."""
        loop, found = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def work() -> None:
            try:
                result, settle = function(), found.set_result
            except Exception as error:
                result, settle = error, found.set_exception
            loop.call_soon_threadsafe(lambda: found.done() or settle(result))

        with self.changed:
            self.calls.append(work)
            self.changed.notify()
        return await found

    def scores(self, prompt: Sequence[int], top: int) -> Logprobs:
        """What the target thinks of a prompt's tokens; for `call`."""
        return prompt_logprobs(self.target, prompt, top)

    def stop(self) -> None:
        """End the thread after its step."""
        with self.changed:
            self.stopping = True
            self.changed.notify()
        self.thread.join()

    def _run(self) -> None:
        while True:
            with self.changed:
                while not (self.waiting or self.calls or self.running or self.stopping):
                    self.changed.wait()
                if self.stopping:
                    return
                calls, newcomers = self._taken()
            for call in calls:
                call()
            self._step(newcomers)

    def _taken(self) -> tuple[list[Callable[[], None]], list[Job]]:
        """What to do now, after rows that nobody waits for are free; called with the lock."""
        if self.gone:
            self.rows.cancel(self.gone)
            for number in self.gone & self.running.keys():
                self.running.pop(number).metrics.end("abort")
            self.gone.clear()
        free = self.rows.max_rows - self.rows.count
        count = min(free, len(self.waiting)) if free >= self.least else 0
        newcomers = [self.waiting.popleft() for _ in range(count)]
        self.running |= {job.id: job for job in newcomers}
        calls = [*self.calls]
        self.calls.clear()
        return calls, newcomers

    def _step(self, newcomers: Sequence[Job]) -> None:
        """Read the prompts of newcomers, and make one step of all rows."""
        try:
            tickets = [Ticket(job.id, job.request) for job in newcomers]
            for gain in self.rows.admit(tickets) if tickets else ():
                self._deliver(gain)
            for gain in self.rows.step():
                self._deliver(gain)
        except Exception as error:
            logger.exception("decoding failed; all running answers are given up")
            self.rows.batches.clear()
            for job in self.running.values():
                job.metrics.end("error")
                job.send(ApiError(500, f"decoding failed: {error}"))
            with self.changed:
                self.running.clear()

    def _deliver(self, gain: Gain) -> None:
        """Send what an answer has gained."""
        job = self.running[gain.ticket.id]  # type: ignore[index]  # ids are those of jobs
        if not job.text.drafted:
            # In steps: the exact number would tell what others have sent.
            job.reused = gain.row.reused // REUSE_STEP * REUSE_STEP
            job.metrics.note_prompt(len(job.request.prompts[0]), job.reused)
        job.metrics.note(len(gain.tokens), gain.proposed, gain.accepted)
        reason = None
        if gain.ended:
            with self.changed:
                del self.running[job.id]
            if gain.row.failed:
                job.metrics.end("error")
                job.send(ApiError(500, no_token_in("the prompt", gain.row.tokens)))
                return
            reason = REASONS.get(str(gain.row.finish_reason), "stop")
            job.metrics.end(reason)
        drafted = [place < gain.accepted for place in range(len(gain.tokens))]
        first = len(job.text.drafted)
        parts = job.text.show(drafted, gain.ended)
        places = job.text.places[first:]
        job.send(Piece(parts, gain.tokens, gain.logprobs, places, reason))
