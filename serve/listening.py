"""Connections of clients: how many there may be, how long without a request, and their end."""

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections import Counter
from typing import Any, ClassVar

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from drafthead.serve import gate
from drafthead.serve.app import Server

logger = logging.getLogger(__name__)
HEADER_SECONDS = 10.0  # in which a request has to follow a connection or an answer
MOMENT = 1.0  # second in which it follows at the latest where clients are quick
MOST_CONNECTIONS = 1024
# Connections without an answer, of an address, that are read as they come, and how many a second
# are from then on: to read one takes the decoding thread's time, also where nothing is asked.
AT_ONCE, A_SECOND = MOST_CONNECTIONS // 2, 64
OTHER_FILES = 64  # that the process may have open beside connections
LAST_SECONDS = 2  # for clients to learn that their answers do not come
# After which a waiting thread is let in. The thread that decodes waits so long at each of its many
# short calls while another reads a large body; Python's own 5 ms would hold up answers far more.
SWITCH_SECONDS = 2e-4


class Pace:
    """A leaky bucket for each address, which says when its connections are read.

    One that had an answer is taken out again, so only those fill it that ask for nothing.
    """

    def __init__(self) -> None:
        self.empty_at: dict[str, float] = {}

    def wait(self, address: str, now: float) -> float:
        """Seconds until a new connection is read; one that would wait too long is not counted."""
        if len(self.empty_at) > MOST_CONNECTIONS:
            self.empty_at = {key: at for key, at in self.empty_at.items() if at > now}
        empty_at = max(now, self.empty_at.get(address, now)) + 1 / A_SECOND
        wait = empty_at - now - AT_ONCE / A_SECOND
        if wait < HEADER_SECONDS:
            self.empty_at[address] = empty_at
        return max(0.0, wait)

    def take_out(self, address: str) -> None:
        """Count a connection no longer."""
        if address in self.empty_at:
            self.empty_at[address] -= 1 / A_SECOND


class Connection(H11Protocol):
    """A connection that makes room for others while none of its requests is answered.

    h11 refuses headers of more than 64 KB; httptools keeps them without an end.
    """

    connections: set["Connection"]  # type: ignore[assignment]
    most = MOST_CONNECTIONS
    leaving: ClassVar[set["Connection"]] = set()  # that are closed, and not yet gone
    pace: ClassVar[Pace] = Pace()

    @property
    def has_request(self) -> bool:
        """Whether the headers of a request have come that is not answered to its end."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_busy(self) -> bool:
        """Whether a whole request is being answered, and the client reads what is sent."""
        return self.has_request and not (self.cycle.more_body or self.flow.write_paused)

    def connection_made(self, transport: Any) -> None:
        """Let a client in, in the pace of its address; one too many closes others."""
        super().connection_made(transport)
        self.address, self.was_answered = str(self.client and self.client[0]), False
        self.idle_since = time.monotonic()
        wait = self.pace.wait(self.address, self.idle_since)
        if wait >= HEADER_SECONDS:
            self.transport.abort()
            return
        if wait:
            self.transport.pause_reading()
            self.loop.call_later(wait, self.read_on)
        self.loop.call_later(HEADER_SECONDS, self.close_idle)
        if len(self.connections) - len(self.leaving) > self.most:
            self.make_room()

    def read_on(self) -> None:
        """Read what has come from a client that had to wait."""
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def make_room(self) -> None:
        """Close connections that are longest without a request, of addresses that have most of
        these: some at a time, as it takes a moment to find them.

        Of many that come at once, each has a moment to send its own, while there are files.
        """
        idle = [each for each in self.connections - self.leaving if not each.is_busy]
        crowd = Counter(each.address for each in idle)
        idle.sort(key=lambda each: (-crowd[each.address], each.idle_since))
        is_full = len(self.connections) - len(self.leaving) > 1.5 * self.most
        for each in idle[: max(1, self.most // 16)]:
            if is_full or self.idle_since - each.idle_since > MOMENT:
                self.leaving.add(each)
                each.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a client that has left."""
        self.leaving.discard(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.idle_since = time.monotonic()
        if not (self.was_answered or self.cycle.disconnected):
            self.was_answered = True
            self.pace.take_out(self.address)
        super().on_response_complete()

    def close_idle(self) -> None:
        """Close the connection if nothing has come or gone for too long, or look again later."""
        now = time.monotonic()
        # The gate answers a request whose body is late.
        most = 2 * gate.BODY_SECONDS if self.has_request else HEADER_SECONDS
        if self.is_busy:
            self.idle_since = now
        elif now - self.idle_since >= most:
            self.transport.abort()
        if not self.transport.is_closing():
            self.loop.call_later(HEADER_SECONDS / 2, self.close_idle)


def listen(app: FastAPI, host: str, port: int, grace: int) -> None:
    """Answer requests until SIGTERM or Ctrl-C; running answers then have `grace` seconds."""
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has ended
        signal.signal(number, lambda *_: None)
    Connection.most = most_connections()
    config = uvicorn.Config(
        app, host, port, http=Connection, backlog=Connection.most // 2, access_log=False,
        log_config=None, timeout_graceful_shutdown=grace + 2 * LAST_SECONDS,
    )  # fmt: skip
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # else a collection walks all that is loaded: a quarter of a second without a token
    Listening(config, grace, app.state.server).run()


class Listening(uvicorn.Server):
    """A server whose running answers have some seconds when it ends; then clients get an error."""

    def __init__(self, config: uvicorn.Config, grace: int, server: Server):
        super().__init__(config)
        self.grace, self.server = grace, server

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        for each in self.servers:
            for listening in each.sockets:
                host, port, *_ = listening.getsockname()
                logger.info("%s at http://%s:%d", self.server.described(), host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running answers end; break off those that are there after the grace."""
        loop = asyncio.get_running_loop()
        ends = (
            loop.call_later(self.grace, self.server.end),
            loop.call_later(self.grace + LAST_SECONDS, self._close),
        )
        await super().shutdown(sockets)
        for each in ends:
            each.cancel()

    def _close(self) -> None:
        """Close the connections of clients that do not read."""
        for each in [*self.server_state.connections]:
            each.transport.abort()


def most_connections() -> int:
    """Return how many connections there are files for, twice: as many again may be just coming.

    It takes as many files as it is allowed to.
    """
    files, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CONNECTIONS + OTHER_FILES
    if 0 <= files < wanted:  # below 0 is no limit
        files = wanted if allowed < 0 else min(wanted, allowed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, allowed))
    return MOST_CONNECTIONS if files < 0 else min(MOST_CONNECTIONS, (files - OTHER_FILES) // 2)
