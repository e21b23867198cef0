"""Calls use one thread while other programs want the processors, and all threads afterwards."""

from pathlib import Path

import torch

from drafthead.backends.cpu.threads import TOLERATED, WINDOW, Crowding, KernelThreads, waited
from drafthead.core.target.processor import OPENMP

THREADS = 2


class Machine:
    """A clock, and threads that wait for a share of the time that the test sets."""

    def __init__(self) -> None:
        self.time, self.share, self.waited = 0.0, 0.0, 0.0
        self.crowding = Crowding(lambda: self.time, lambda: self.waited)

    def share_crowded(self, seconds: float) -> float:
        """The share of calls, one a millisecond, that see a crowd."""
        found = []
        for _ in range(round(seconds * 1000)):
            self.time += 0.001
            self.waited += self.share * 0.001
            found.append(self.crowding.now(THREADS))
        return sum(found) / len(found)


def test_a_crowd_is_seen_by_waiting_and_forgotten_when_that_ends() -> None:
    machine = Machine()
    machine.share = TOLERATED * THREADS / 2
    assert machine.share_crowded(2) == 0
    machine.share = 2 * TOLERATED * THREADS
    assert machine.share_crowded(3 * WINDOW) > 0
    assert machine.share_crowded(20) > 0.9, "several threads are tried again more and more seldom"
    machine.share = 0
    machine.share_crowded(3)
    assert machine.share_crowded(5) == 0


def test_threads_are_set_for_the_call_and_set_back() -> None:
    machine = Machine()
    machine.share = 2 * TOLERATED * THREADS
    machine.share_crowded(3 * WINDOW)
    calls: list[int] = []
    torch.set_num_threads(2)
    for set_threads in (calls.append, None):
        with KernelThreads(machine.crowding, set_threads).for_a_call():
            pass
    assert calls == [1, 2]


def test_torchs_own_openmp_is_told() -> None:
    torch.set_num_threads(2)
    if OPENMP is not None:  # as in torch's packages for Linux
        OPENMP.omp_set_num_threads(1)
        assert torch.get_num_threads() == 1


def test_the_waiting_of_all_threads_is_added_up(tmp_path: Path) -> None:
    for thread, line in {"7": "900 1500000000 3", "8": "100 500000000 2", "9": ""}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(line)
    assert waited(tmp_path) == 2.0
    assert waited(tmp_path / "unknown") == 0.0
