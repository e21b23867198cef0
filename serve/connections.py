"""Connections of clients: how many there may be, and how long they may be without a request."""

import resource
import time
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_SECONDS = 10.0  # in which a request has to follow a connection or an answer
MOMENT = 1.0  # second in which it follows at the latest where clients are quick
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
        """Let a client in; one too many closes the one that is longest without a request.

        Of many that come at once, each has a moment to send its own, while there are files.
        """
        super().connection_made(transport)
        self.idle_since = now = time.monotonic()
        self.loop.call_later(HEADER_SECONDS, self.close_idle)
        count = len(self.connections)
        if count > self.most:
            idle = [each for each in self.connections if not each.is_busy]
            oldest = min(idle, key=lambda each: each.idle_since)
            if now - oldest.idle_since > MOMENT or count > 1.5 * self.most:
                oldest.transport.abort()

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
    """How many connections the process has files for, twice: as many again may be just coming.

    It takes as many files as it is allowed to.
    """
    files, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CONNECTIONS + OTHER_FILES
    if 0 <= files < wanted:  # below 0 is no limit
        files = wanted if allowed < 0 else min(wanted, allowed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, allowed))
    return MOST_CONNECTIONS if files < 0 else min(MOST_CONNECTIONS, (files - OTHER_FILES) // 2)
