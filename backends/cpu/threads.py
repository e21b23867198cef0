"""The number of threads of a call of our kernels: one while other programs want the processors.

The threads of a call wait for each other at the end of each part, some hundred times a pass, and
OpenMP waits by counting, for milliseconds. On a busy machine one of them is always interrupted: the
others use up their own time with waiting, and a pass takes ten times as long as its share of the
machine would explain. A single thread waits for nobody.

The sign is the time for which our threads could have run and had no processor: next to none where
the machine is quiet, whatever interrupts them for a moment, and most of it beside busy programs.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from drafthead.core.target.processor import OPENMP

WINDOW = 0.1  # seconds over which waiting is added up
TOLERATED = 0.25  # seconds of waiting a second, for each thread of a call
SHORTEST, LONGEST = 0.1, 2.0  # seconds with one thread before all are tried again


class Crowding:
    """Whether other programs want our processors, from a clock and a sum of waiting."""

    def __init__(self, clock: Callable[[], float], waited: Callable[[], float]):
        """`waited` returns the seconds for which all our threads together waited so far."""
        self.clock, self.waited = clock, waited
        self.seen, self.since = waited(), clock()
        self.until, self.rest = 0.0, SHORTEST  # when all threads are tried again; the next pause

    def now(self, threads: int) -> bool:
        """Whether this moment is crowded for a call of so many threads; asked before each call."""
        now = self.clock()
        if now < self.until:
            return True
        if self.until:  # a pause ends: the waiting during it says nothing about several threads
            self.until, self.seen, self.since = 0.0, self.waited(), now
        elif now - self.since >= WINDOW:
            self._look(now, threads)
        return self.until > 0

    def _look(self, now: float, threads: int) -> None:
        """Judge the window that has just ended."""
        seen = self.waited()
        if seen - self.seen > TOLERATED * threads * (now - self.since):
            # Twice as long after each failure, so that a machine that stays busy is seldom tried.
            self.until, self.rest = now + self.rest, min(2 * self.rest, LONGEST)
        else:
            self.rest = max(self.rest / 2, SHORTEST)
        self.seen, self.since = seen, now


class KernelThreads:
    """Sets the number of threads for single calls."""

    def __init__(self, crowding: Crowding, set_threads: Callable[[int], object] | None):
        """Without `set_threads` calls use as many threads as torch does."""
        self.crowding, self.set_threads = crowding, set_threads

    @contextmanager
    def for_a_call(self) -> Iterator[None]:
        """Use one thread within, if the machine is crowded."""
        count = torch.get_num_threads()
        if self.set_threads is None or count == 1 or not self.crowding.now(count):
            yield
            return
        # Of OpenMP alone: torch's own setting stays.
        self.set_threads(1)
        try:
            yield
        finally:
            self.set_threads(count)


def waited(threads: Path = Path("/proc/self/task")) -> float:
    """Seconds for which this process's living threads waited for a processor.

    0 on systems that do not tell, where a crowd is never seen.
    """
    nanoseconds = 0
    for thread in threads.glob("*/schedstat"):
        try:
            nanoseconds += int(thread.read_bytes().split()[1])
        except (OSError, IndexError, ValueError):  # it has just ended
            continue
    return nanoseconds / 1e9


# torch's own function, `set_num_threads`, would also set up the libraries for products again.
threads = KernelThreads(
    Crowding(time.perf_counter, waited), None if OPENMP is None else OPENMP.omp_set_num_threads
)
