"""Connections of clients: how many there may be, and how long they may be without a request."""

import time
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

try:
    import resource
except ModuleNotFoundError:  # on Windows a process may have as many sockets as it likes
    resource = None  # type: ignore[assignment]

HEADER_SECONDS = 10.0  # in which a request has to follow a connection or an answer
MOST_CONNECTIONS = 1024
OTHER_FILES = 64  # that the process may have open beside connections
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that makes room for another one while no request of it is answered."""

    most = MOST_CONNECTIONS

    @property
    def is_busy(self) -> bool:
        """Whether a request of it is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Let a client in; for it the connection is closed that has been without a request longest.

        Where all have one, it is told to come later.
        """
        super().connection_made(transport)
        self.idle_since = time.monotonic()
        self.loop.call_later(HEADER_SECONDS, self.close_idle)
        if len(self.connections) <= self.most:
            return
        idle = [each for each in self.connections if each is not self and not each.is_busy]
        if idle:
            min(idle, key=lambda each: each.idle_since).transport.abort()
        else:
            transport.write(BUSY)
            transport.close()

    def close_idle(self) -> None:
        """Close the connection where it has been without a request for too long; else look later."""
        now = time.monotonic()
        if self.transport.is_closing():
            return
        if self.is_busy:
            self.idle_since = now
        elif now - self.idle_since >= HEADER_SECONDS:
            self.transport.abort()
            return
        self.loop.call_later(HEADER_SECONDS / 2, self.close_idle)


def most_connections() -> int:
    """How many connections the process has files for, twice: as many again may be just coming."""
    if resource is None:
        return MOST_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(8, min(MOST_CONNECTIONS, (files - OTHER_FILES) // 2))
