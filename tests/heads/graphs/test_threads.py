"""Calls use one thread while other programs want the processors, and all threads afterwards."""

import torch

from drafthead.heads.graphs.threads import TOLERATED, WINDOW, Crowding, Threads, openmp


class Machine:
    """A clock, and interruptions at a rate that the test sets."""

    def __init__(self) -> None:
        self.time, self.rate, self.count = 0.0, 0.0, 0.0
        self.crowding = Crowding(lambda: self.time, lambda: int(self.count))

    def share_crowded(self, seconds: float) -> float:
        """The share of calls, one a millisecond, that see a crowd."""
        found = []
        for _ in range(round(seconds * 1000)):
            self.time += 0.001
            self.count += self.rate * 0.001
            found.append(self.crowding.now())
        return sum(found) / len(found)


def test_a_crowd_is_seen_by_its_interruptions_and_forgotten_when_they_end() -> None:
    machine = Machine()
    machine.rate = TOLERATED / 4
    assert machine.share_crowded(2) == 0
    machine.rate = 4 * TOLERATED
    assert machine.share_crowded(3 * WINDOW) > 0
    assert machine.share_crowded(20) > 0.95, "several threads are tried again more and more seldom"
    machine.rate = 0
    machine.share_crowded(3)
    assert machine.share_crowded(5) == 0


def test_threads_are_set_for_the_call_and_set_back() -> None:
    machine = Machine()
    machine.rate = 4 * TOLERATED
    machine.share_crowded(3 * WINDOW)
    calls: list[int] = []
    torch.set_num_threads(2)
    for set_threads in (calls.append, None):
        with Threads(machine.crowding, set_threads).for_a_call():
            pass
    assert calls == [1, 2]


def test_torchs_own_openmp_is_told() -> None:
    torch.set_num_threads(2)
    set_threads = openmp()
    if set_threads is not None:  # as in torch's packages for Linux
        set_threads(1)
        assert torch.get_num_threads() == 1
