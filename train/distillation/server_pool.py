"""Several servers of one model: how many requests each gets, and who answers while one is away."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, Queue
from threading import Thread
from typing import Any, TypeAlias

from drafthead.core.errors import UserError
from drafthead.infer.serving import Answer, ServeRequest
from drafthead.train.distillation import connection as times
from drafthead.train.distillation.answer_source import Questions
from drafthead.train.distillation.connection import (
    MOST_AT_ONCE,
    AwayError,
    RefusedRequestError,
    ServedModel,
    ServerConnection,
    find_model,
)

logger = logging.getLogger(__name__)

FIRST = 4  # requests that a server gets at a time, until it is known how it bears more
GROWS = 1.1  # times as many tokens a second, for which twice as many requests are worth it
TEXT = "The largest city in the world that lies on two continents is Istanbul, and its"
SAME = 0.1  # mean difference of log-probabilities; those of a model in 16 bits differ by 0.02


class Pace:
    """The number of requests on their way to a server: doubled while tokens a second grow."""

    def __init__(self) -> None:
        self.at_once, self.best, self.is_found = FIRST, 0.0, False
        self._begin()

    def _begin(self) -> None:
        self.began, self.answers, self.tokens = time.monotonic(), 0, 0

    def count(self, tokens: int, is_full: bool) -> None:
        """Count an answer; only while the server has had `at_once` requests it is measured."""
        if not is_full or self.is_found:
            self._begin()
            return
        self.answers, self.tokens = self.answers + 1, self.tokens + tokens
        if self.answers < 2 * self.at_once:  # each place about twice
            return
        speed = self.tokens / (time.monotonic() - self.began)
        self.is_found = speed < GROWS * self.best or 2 * self.at_once > MOST_AT_ONCE
        if speed >= GROWS * self.best:
            self.best = speed
            self.at_once *= 1 if self.is_found else 2
        else:
            self.at_once //= 2
        self._begin()

    def halve(self) -> None:
        """Ask less of a server that says it is busy."""
        self.at_once, self.is_found = max(1, self.at_once // 2), True


class PooledServer:
    """One server: what it has to do, and when it is asked again after it was away."""

    def __init__(self, url: str, name: str | None, target: str):
        """`name` of the model, as for `find_model`. Nothing is sent yet."""
        self.connection, self.name, self.target = ServerConnection(url), name, target
        self.pace = Pace()
        self.in_flight = 0
        self.is_up = self.is_looked_at = False
        self.failures, self.failed_at, self.back_at = 0, -math.inf, 0.0
        self.reason = ""  # why it was away last

    @property
    def has_room(self) -> bool:
        """Whether it can be asked something."""
        return self.is_up and self.in_flight < self.pace.at_once

    def rest(self, error: AwayError, asked_at: float) -> None:
        """Leave it alone for a while, longer each time."""
        self.is_up = False
        if asked_at < self.failed_at:  # of one failure many requests tell
            return
        self.failures, self.failed_at = self.failures + 1, time.monotonic()
        seconds = times.BACKOFF * 2 ** min(self.failures - 1, 10)
        seconds = min(times.MOST, seconds if error.seconds is None else error.seconds)
        self.back_at, self.reason = self.failed_at + seconds, error.reason
        if error.reason.startswith("status"):
            self.pace.halve()
        if self.failures == 1:
            logger.warning("%s is busy or away (%s); trying again", self.url, error.reason)

    @property
    def url(self) -> str:
        """Its address."""
        return self.connection.url


def log_probabilities(
    server: PooledServer, model: ServedModel, ids: list[int]
) -> list[float] | None:
    """The log-probabilities of tokens [T - 1]; None of a server that does not show them."""
    body = {"model": model.name, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "logprobs": 1}
    try:
        [choice] = server.connection.send("completions", body | {"echo": True})["choices"]
        return [float(value) for value in choice["logprobs"]["token_logprobs"][1 : len(ids)]]
    except (RefusedRequestError, KeyError, TypeError, ValueError):
        return None


def refuse_other(one: "KnownModel", other: "KnownModel") -> None:
    """Raise UserError, with their names, where two servers do not serve the same model."""
    for what, a, b in (
        ("the model", one.model.name, other.model.name),
        ("max_model_len", one.model.max_length, other.model.max_length),
    ):
        if a != b:
            raise UserError(
                f"{one.url} serves {what} {a}, {other.url} {b}: start all servers alike, or leave "
                "one out"
            )
    if one.logprobs and other.logprobs and len(one.logprobs) == len(other.logprobs):
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        apart = sum(abs(a - b) for a, b in pairs) / len(one.logprobs)
        if not apart <= SAME:
            raise UserError(
                f"{one.url} and {other.url} both serve {one.model.name}, but other weights "
                f"(log-probabilities of a text differ by {apart:.2f}): leave one out"
            )


@dataclass(frozen=True)
class KnownModel:
    """The model that a server has been found to serve."""

    url: str
    model: ServedModel
    logprobs: list[float] | None


# What a thread has found: of a question an answer, of a look what is served, or why there is none.
Found: TypeAlias = tuple[PooledServer, float, ServeRequest | None, Answer | KnownModel | Exception]


class ServerPool:
    """Servers of one model that answer together, whichever of them are there."""

    def __init__(self, servers: Sequence[PooledServer], ids: list[int]):
        """`ids` of a text, of which servers are compared. Raises UserError if none is there."""
        self.servers, self.ids = servers, ids
        self.again: deque[ServeRequest] = deque()  # questions that came back
        self.tries: dict[Any, int] = {}  # of questions that came back
        self.ended = False  # no more questions come
        self.found: Queue[Found] = Queue()
        known, errors = list[KnownModel](), list[AwayError]()
        for server in servers:
            try:
                known.append(self._look(server))
                server.is_up = True
            except AwayError as error:
                errors.append(error)
                server.rest(error, time.monotonic())
        if not known:
            raise errors[0]
        self.known = known[0]
        for other in known[1:]:
            refuse_other(self.known, other)

    @property
    def at_once(self) -> int:
        """Questions that the servers take together."""
        return sum(server.pace.at_once for server in self.servers)

    def _look(self, server: PooledServer) -> KnownModel:
        model = find_model(server.connection, server.name, server.target)
        several = len(self.servers) > 1
        logprobs = log_probabilities(server, model, self.ids) if several else None
        return KnownModel(server.url, model, logprobs)

    def answers(
        self, questions: Questions, ask: Callable[[PooledServer, ServeRequest], Answer]
    ) -> Iterator[Answer]:
        """The answers as they come, each of the server with most room, until None is in the queue.

        Raises UserError when all servers are gone, and what `ask` raises.
        """
        while True:
            self._hand_out(questions, ask)
            if not (any(server.in_flight for server in self.servers) or self.again):
                return
            try:
                server, asked_at, question, found = self.found.get(timeout=self._wait())
            except Empty:
                continue
            if question is None:
                self._looked_at(server, asked_at, found)
                continue
            is_full = server.in_flight == server.pace.at_once
            server.in_flight -= 1
            if isinstance(found, AwayError):
                self._come_back(server, asked_at, question, found)
            elif isinstance(found, Exception):
                raise found
            else:
                assert isinstance(found, Answer)
                if asked_at >= server.failed_at:
                    server.failures = 0
                server.pace.count(len(found.tokens), is_full)
                yield found

    def _hand_out(
        self, questions: Questions, ask: Callable[[PooledServer, ServeRequest], Answer]
    ) -> None:
        """Ask servers that have room, and look after those that were away."""
        now = time.monotonic()
        for server in self.servers:
            if not server.is_up and not server.is_looked_at and server.back_at <= now:
                server.is_looked_at = True
                self._start(server, None, partial(self._look, server))
        while free := [server for server in self.servers if server.has_room]:
            question = self._next(questions)
            if question is None:
                return
            server = min(free, key=lambda one: one.in_flight / one.pace.at_once)
            server.in_flight += 1
            self._start(server, question, partial(ask, server, question))

    def _next(self, questions: Questions) -> ServeRequest | None:
        """The next question; None where there is none now. If nothing is asked, one is awaited."""
        if self.again:
            return self.again.popleft()
        idle = not any(server.in_flight for server in self.servers)
        try:
            question = None if self.ended else questions.get(block=idle)
        except Empty:
            return None
        self.ended |= question is None
        assert question is None or isinstance(question, ServeRequest)
        return question

    def _start(
        self, server: PooledServer, question: ServeRequest | None, work: Callable[[], Any]
    ) -> None:
        """Let a thread do something; Ctrl-C need not wait for it."""

        def run() -> None:
            asked_at = time.monotonic()
            try:
                found = work()
            except Exception as error:  # is raised where the answers are read
                found = error
            self.found.put((server, asked_at, question, found))

        Thread(target=run, daemon=True).start()

    def _wait(self) -> float | None:
        """The seconds until a server is looked at again; None where none is away."""
        away = [s.back_at for s in self.servers if not (s.is_up or s.is_looked_at)]
        return max(0.0, min(away) - time.monotonic()) if away else None

    def _looked_at(self, server: PooledServer, asked_at: float, found: object) -> None:
        """Note that a server is back, or still away; raises UserError for another model."""
        server.is_looked_at = False
        if isinstance(found, AwayError):
            self._gone(server, asked_at, found)
        elif isinstance(found, Exception):
            raise found
        else:
            assert isinstance(found, KnownModel)
            refuse_other(self.known, found)
            server.is_up = True
            logger.info("%s is asked again", server.url)

    def _come_back(
        self, server: PooledServer, asked_at: float, question: ServeRequest, error: AwayError
    ) -> None:
        """Give a question to whoever is there; UserError for one that nobody answers."""
        self._gone(server, asked_at, error)
        self.again.append(question)
        self.tries[question.id] = self.tries.get(question.id, 0) + 1
        if self.tries[question.id] > times.TIMES * len(self.servers):
            raise error

    def _gone(self, server: PooledServer, asked_at: float, error: AwayError) -> None:
        """Let a server rest; raises UserError when all have been away for long."""
        server.rest(error, asked_at)
        if all(one.failures > times.TIMES for one in self.servers):
            if len(self.servers) == 1:
                raise error
            gone = ", ".join(f"{one.url} ({one.reason})" for one in self.servers)
            raise UserError(
                f"no server answers any more: {gone}; start one and run the same command again, "
                "which goes on after the rows that are written"
            )
