"""Requests that wait for a free row: read one at a time, and checked one by one."""

from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Queue
from typing import TypeAlias

from drafthead.heads.errors import UserError
from drafthead.infer.request.prompts import Prompt
from drafthead.infer.request.request import Request
from drafthead.infer.serving.serve_request import Answer, ServeRequest, Ticket

Requests: TypeAlias = Iterable[ServeRequest | Prompt] | Queue[ServeRequest | Prompt | None]
# The checked form of a request with its number.
Reader: TypeAlias = Callable[[ServeRequest, int], Request]


class WaitingRequests:
    """The requests that have not been admitted yet, of an iterable or of a queue.

    An iterable is asked for the next request whenever rows are free. A queue is waited for only
    while no row runs; None in it means that no more requests come.
    """

    def __init__(self, requests: Requests, read: Reader):
        """Raises UserError for a string, whose letters would be requests."""
        if isinstance(requests, str):
            raise UserError("serve takes an iterable of prompts, not one prompt: put it in a list")
        self.queue = requests if isinstance(requests, Queue) else None
        self.iterator: Iterator[ServeRequest | Prompt] = (
            iter(()) if isinstance(requests, Queue) else iter(requests)
        )
        self.read = read
        self.taken = 0
        self.ended = False

    def take(self, count: int, wait: bool) -> list[Ticket | Answer]:
        """Up to `count` requests: tickets, and answers to those that cannot be honoured.

        With `wait` a queue's first request is waited for.
        """
        found: list[Ticket | Answer] = []
        while len(found) < count and not self.ended:
            try:
                found.append(self._ticket(self._next(wait and not found)))
            except Empty:
                break
            except StopIteration:
                self.ended = True
        return found

    def _next(self, wait: bool) -> ServeRequest | Prompt:
        """The next request; raises StopIteration after the last, Empty when none is there now."""
        if self.queue is None:
            return next(self.iterator)
        given = self.queue.get(block=wait)
        if given is None:
            raise StopIteration
        return given

    def _ticket(self, given: ServeRequest | Prompt) -> Ticket | Answer:
        """The request in token ids and limits, or the reason why it cannot be answered."""
        request = given if isinstance(given, ServeRequest) else ServeRequest(given)
        number, self.taken = self.taken, self.taken + 1
        name = number if request.id is None else request.id
        try:
            return Ticket(name, self.read(request, number))
        except Exception as error:  # chat templates and tokenizers raise many kinds
            return Answer(name, error=str(error) or type(error).__name__)
