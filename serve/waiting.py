"""One queue for all work: who waits for what, for how long, and who is next."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from drafthead.serve.errors import ApiError

Found = TypeVar("Found")


@dataclass(eq=False)
class Visit:
    """Work of a client, which waits for a place or has one."""

    client: str
    size: int  # of the work, beside that of others
    begin: Callable[[], None]  # called when there is a place
    give_up: Callable[[ApiError], None]  # called when the work ends without a result
    timer: asyncio.TimerHandle | None = None


@dataclass
class Queue:
    """All who wait in a server, whatever for."""

    most: int
    seconds: float  # after which a visit is given up that has no place
    count: int = 0


class Line:
    """The queue of one kind of work, which has a number of places.

    Next is the client with the fewest places, and of these the one that has had the least work. Of
    its visits the smallest goes first, but each second time the oldest. Some places more are for
    clients that have none, so nobody waits until another's long work has ended.
    """

    def __init__(self, queue: Queue, places: int, spare: int = 0, least: int = 1):
        """Nobody is let in before `least` places are free."""
        self.queue, self.places, self.spare, self.least = queue, places, spare, least
        self.waiting: list[Visit] = []  # the oldest first
        self.inside: set[Visit] = set()
        self.had: dict[str, float] = {}  # the work of clients that are here; `now` as they come
        self.now = 0.0  # the work that a client has had who was here all the time
        self.turns = 0

    def free(self, client: str | None = None) -> int:
        """Return the number of places that are free, for a client."""
        has_none = client is not None and all(each.client != client for each in self.inside)
        return max(0, self.places + self.spare * has_none - len(self.inside))

    @property
    def is_full(self) -> bool:
        """Whether nobody may join it."""
        return self.queue.count >= self.queue.most + self.free()

    def refuse(self, count: int, client: str) -> None:
        """Raise ApiError 429 where a client may not bring so many visits."""
        waiting = self.queue.count
        if waiting + count > self.queue.most + self.free(client):
            raise ApiError(
                429,
                f"{waiting} requests wait and {count} more are asked for, but the queue holds "
                f"{self.queue.most}: try again later",
            )

    def enter(self, visits: Sequence[Visit]) -> None:
        """Let a client's visits wait, or begin; raises ApiError as `refuse`."""
        self.refuse(len(visits), visits[0].client)
        loop = asyncio.get_running_loop()
        for visit in visits:
            self.had.setdefault(visit.client, self.now)
            visit.timer = loop.call_later(self.queue.seconds, self._give_up, visit)
        self.waiting += visits
        self.queue.count += len(visits)
        self._let_in()

    def leave(self, visit: Visit) -> bool:
        """End a visit, whose place is free; returns whether it was still waiting for one."""
        if waited := visit in self.waiting:
            self._take(visit)
        self.inside.discard(visit)
        if all(each.client != visit.client for each in (*self.waiting, *self.inside)):
            self.had.pop(visit.client, None)
        self._let_in()
        return waited

    def end(self, error: ApiError) -> int:
        """Give up all visits with an error; returns how many there were."""
        visits = [*self.waiting, *self.inside]
        for visit in visits:
            visit.give_up(error)
        return len(visits)

    def _give_up(self, visit: Visit) -> None:
        self.leave(visit)
        sentence = f"no place was free for {self.queue.seconds:.0f} seconds: try again later"
        visit.give_up(ApiError(503, sentence))

    def _take(self, visit: Visit) -> None:
        """Let a visit wait no longer."""
        self.waiting.remove(visit)
        self.queue.count -= 1
        if visit.timer is not None:
            visit.timer.cancel()

    def _let_in(self) -> None:
        """Let visits begin for which there are places."""
        is_open = self.free() >= self.least
        while (visit := self._next(is_open)) is not None:
            self._take(visit)
            self.inside.add(visit)
            self.had[visit.client] += visit.size
            self.now += visit.size / len(self.had)
            visit.begin()

    def _next(self, is_open: bool) -> Visit | None:
        """Choose who is next, if there is a place; `is_open` for clients that have some already."""
        places = Counter(each.client for each in self.inside)
        rank = {client: (places[client], had) for client, had in self.had.items()}
        first = min((rank[each.client] for each in self.waiting), default=(0, 0))
        has_none = first[0] == 0
        is_open = is_open or has_none
        if not (is_open and len(self.inside) < self.places + self.spare * has_none):
            return None
        equals = [each for each in self.waiting if rank[each.client] == first]
        self.turns += 1
        oldest = self.turns % 2 == 0
        return min(equals, key=lambda each: 0 if oldest else each.size, default=None)

    async def arrive(self, client: str, size: int) -> Visit:
        """Wait for a place, which the visit has until it leaves; raises ApiError 429 and 503."""
        there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        visit = Visit(
            client,
            size,
            lambda: None if there.done() else there.set_result(None),
            lambda error: None if there.done() else there.set_exception(error),
        )
        self.enter([visit])
        try:
            await there
        except BaseException:
            self.leave(visit)
            raise
        return visit

    @asynccontextmanager
    async def place(self, client: str, size: int) -> AsyncIterator[Visit]:
        """A place within a block; raises ApiError 429 and 503 where there is none."""
        visit = await self.arrive(client, size)
        try:
            yield visit
        finally:
            self.leave(visit)


class Threads(Line):
    """A line whose work is done by threads, beside the event loop."""

    def __init__(self, queue: Queue, places: int, name: str, spare: int = 0):
        super().__init__(queue, places, spare)
        self.pool = ThreadPoolExecutor(places + spare, thread_name_prefix=name)

    async def do(self, client: str, size: int, function: Callable[[], Found]) -> Found:
        """Call a function in its turn; nothing is begun for a client that has left.

        The place is free when the thread is, also where the client leaves before.
        """
        visit, loop = await self.arrive(client, size), asyncio.get_running_loop()

        def leave(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.leave, visit)

        working = self.pool.submit(function)
        working.add_done_callback(leave)
        return await asyncio.wrap_future(working)
