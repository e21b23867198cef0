"""Connections of clients: how many there may be, and how long they may be without a request."""

import resource
import time
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_SECONDS = 10.0  # in which a request has to follow a connection or an answer
MOST_CONNECTIONS = 1024
OTHER_FILES = 64  # that the process may have open beside connections


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that makes room for others while none of its requests is answered."""

    most = MOST_CONNECTIONS

    @property
    def is_busy(self) -> bool:
        """Whether a request of it is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Let a client in; one too many closes the one that is longest without a request."""
        super().connection_made(transport)
        self.idle_since = time.monotonic()
        self.loop.call_later(HEADER_SECONDS, self.close_idle)
        if len(self.connections) > self.most:
            idle = [each for each in self.connections if not each.is_busy]
            min(idle, key=lambda each: each.idle_since).transport.abort()

    def close_idle(self) -> None:
        """Close the connection if it was without a request for too long, or look again later."""
        now = time.monotonic()
        if self.is_busy:
            self.idle_since = now
        elif now - self.idle_since >= HEADER_SECONDS:
            self.transport.abort()
        if not self.transport.is_closing():
            self.loop.call_later(HEADER_SECONDS / 2, self.close_idle)


def most_connections() -> int:
    """How many connections the process has files for, twice: as many again may be just coming."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(8, min(MOST_CONNECTIONS, (files - OTHER_FILES) // 2))
