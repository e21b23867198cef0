"""A process that reads large bodies first, and lets those pass that cost little.

To read one holds Python's lock, for which the thread that decodes would wait at each of its calls.
"""

import multiprocessing
import signal
from multiprocessing.connection import Connection
from threading import Lock

from drafthead.serve.errors import ApiError
from drafthead.serve.limits import Limits

LARGE = 1 << 16  # bytes; smaller ones are read in no time


def answer(given: Connection, limits: Limits) -> None:
    """Say of each body what is wrong with it, until the server has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C, which the server answers
    while True:
        try:
            content_type, body = given.recv(), given.recv_bytes()
        except EOFError:
            return
        try:
            limits.given(body, content_type)
            given.send(None)
        except ApiError as error:
            given.send((error.status_code, error.detail, error.param, error.code))


class LargeBodies:
    """A process that begins with the first large body, and again after its end."""

    def __init__(self, limits: Limits):
        self.limits, self.lock = limits, Lock()
        self.asked: Connection | None = None

    def refuse(self, body: bytes, content_type: str) -> None:
        """Raise ApiError, as `Limits.given`, for a large body; small ones pass."""
        if len(body) <= LARGE:
            return
        with self.lock:
            if self.asked is None:
                self.asked = self.begun()
            try:
                self.asked.send(content_type)
                self.asked.send_bytes(body)
                found = self.asked.recv()
            except (EOFError, OSError) as error:  # ended, for want of memory or by somebody
                self.asked = None
                raise ApiError(503, "the body could not be read: try again later") from error
        if found is not None:
            raise ApiError(*found)

    def begun(self) -> Connection:
        """A new process."""
        ours, theirs = multiprocessing.Pipe()
        own = multiprocessing.get_context("spawn")
        own.Process(target=answer, args=(theirs, self.limits), daemon=True).start()
        theirs.close()  # so each learns of the other's end
        return ours
