"""How many threads a call of a graph uses: one while other programs want the processors.

The threads of a graph wait for each other at the end of each operation, a hundred times a pass, and
OpenMP waits by counting, for milliseconds. On a busy machine one of them is always interrupted: the
others use up their own time with waiting, and a pass takes ten times as long as its share of the
machine would explain. A single thread waits for nobody.

The sign is involuntary context switches: the system has taken a processor from us for another
program. A machine with room causes next to none.
"""

import ctypes
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

WINDOW = 0.02  # seconds over which interruptions are counted
TOLERATED = 60.0  # interruptions a second; two busy programs on two processors cause hundreds
SHORTEST, LONGEST = 0.1, 2.0  # seconds with one thread before all are tried again


class Crowding:
    """Whether other programs want our processors, from a clock and a count of interruptions."""

    def __init__(self, clock: Callable[[], float], interruptions: Callable[[], int]):
        self.clock, self.interruptions = clock, interruptions
        self.seen, self.since = interruptions(), clock()
        self.until, self.rest = 0.0, SHORTEST  # when all threads are tried again; the next pause

    def now(self) -> bool:
        """Whether this moment is crowded; asked before each call."""
        now = self.clock()
        if now < self.until:
            return True
        if self.until:  # a pause ends: the interruptions during it say nothing about two threads
            self.until, self.seen, self.since = 0.0, self.interruptions(), now
        elif now - self.since >= WINDOW:
            self._look(now)
        return self.until > 0

    def _look(self, now: float) -> None:
        """Judge the window that has just ended."""
        seen = self.interruptions()
        if seen - self.seen > TOLERATED * (now - self.since):
            self.until, self.rest = now + self.rest, min(2 * self.rest, LONGEST)
        else:
            self.rest = max(self.rest / 2, SHORTEST)
        self.seen, self.since = seen, now


class Threads:
    """Sets the number of threads for single calls."""

    def __init__(self, crowding: Crowding, set_threads: Callable[[int], object] | None):
        """Without `set_threads` calls use as many threads as they were compiled for."""
        self.crowding, self.set_threads = crowding, set_threads

    @contextmanager
    def for_a_call(self) -> Iterator[None]:
        """Use one thread within, if the machine is crowded."""
        count = torch.get_num_threads()
        if self.set_threads is None or count == 1 or not self.crowding.now():
            yield
            return
        self.set_threads(1)
        try:
            yield
        finally:
            self.set_threads(count)


def openmp() -> Callable[[int], object] | None:
    """The function that sets the number of threads of torch's own OpenMP, where that is known.

    torch's own, `set_num_threads`, would also set up the libraries for products anew.
    """
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        return ctypes.CDLL(str(path)).omp_set_num_threads
    return None


def interruptions() -> int:
    """How often the system has taken a processor from this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


threads = Threads(Crowding(time.perf_counter, interruptions), openmp())
