"""Recorded calls, with a rehearsal in place of the GPU: it repeats the call at fixed addresses."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Event
from time import sleep
from typing import NamedTuple
from weakref import WeakSet, finalize, ref

import pytest
import torch
from rehearsal import Rehearsal

from drafthead.backends.cuda import recorded as module
from drafthead.backends.cuda.recorded import (
    MOST_KEPT,
    CaptureError,
    Capturing,
    Recorded,
    captured,
    fixed_like,
)


class Sums(NamedTuple):
    rows: torch.Tensor
    extra: tuple[torch.Tensor, ...]
    missing: None


def step(store: list[torch.Tensor], column: torch.Tensor, table: torch.Tensor, scale: int) -> Sums:
    """Writes a column of the store in place, as a step writes its cache."""
    for part in store:
        part.index_copy_(1, column, table)
    return Sums(table.sum(1) * scale, (store[0].sum(1),), None)


def arguments(seed: int, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randperm(8)[:width], torch.randn(rows, width)


def test_repetitions_give_what_the_function_gives_and_write_what_is_held() -> None:
    recorded, plain = [torch.zeros(2, 8)], [torch.zeros(2, 8)]
    rehearsal = Rehearsal()
    calls = Recorded(step, held=[0], capture=rehearsal)
    sizes = [1, 3, 1, 1, 3, 3, 2]
    answers = [
        (calls(recorded, *arguments(seed, 2, size), 2), step(plain, *arguments(seed, 2, size), 2))
        for seed, size in enumerate(sizes)
    ]
    # Compared at the end: later calls have not changed the earlier answers.
    for ours, theirs in answers:
        assert isinstance(ours, Sums)
        assert ours.missing is None
        torch.testing.assert_close(ours.rows, theirs.rows)
        torch.testing.assert_close(ours.extra, theirs.extra)
    torch.testing.assert_close(recorded, plain)
    assert rehearsal.recorded == 3  # one for each size


def test_what_is_held_elsewhere_and_constants_ask_for_another_recording() -> None:
    rehearsal = Rehearsal()
    calls = Recorded(step, held=[0], capture=rehearsal)
    stores = [[torch.zeros(2, 8)], [torch.zeros(2, 8)]]
    for store in (*stores, *stores):
        calls(store, *arguments(0, 2, 3), 1)
    assert rehearsal.recorded == 2
    assert calls(stores[0], *arguments(0, 2, 3), 5).rows.equal(arguments(0, 2, 3)[1].sum(1) * 5)
    assert rehearsal.recorded == 3


def test_memory_that_comes_back_in_another_shape_asks_for_another_recording() -> None:
    rehearsal, memory = Rehearsal(), torch.zeros(32)
    calls = Recorded(step, held=[0], capture=rehearsal)
    for store in (memory[:16].view(2, 8), memory.view(2, 16)):
        calls([store], *arguments(0, 2, 3), 1)
    assert rehearsal.recorded == 2
    column, table = arguments(0, 2, 3)
    torch.testing.assert_close(memory.view(2, 16)[:, column], table)


def test_a_constant_of_another_type_asks_for_another_recording() -> None:
    rehearsal, store = Rehearsal(), [torch.zeros(2, 8)]
    calls = Recorded(step, held=[0], capture=rehearsal)
    for scale in (1, True):
        calls(store, *arguments(0, 2, 3), scale)
    assert rehearsal.recorded == 2


def test_a_place_has_the_gaps_of_its_argument() -> None:
    part = torch.zeros(3, 8)[:, 2:5]
    assert fixed_like(part).stride() == part.stride()


def test_the_recording_that_was_not_used_for_longest_makes_room() -> None:
    rehearsal = Rehearsal()
    calls, store = Recorded(step, held=[0], capture=rehearsal, most=2), [torch.zeros(2, 8)]
    for width in (1, 2, 1, 3, 1):
        calls(store, *arguments(0, 2, width), 1)
    assert rehearsal.recorded == 3
    calls(store, *arguments(0, 2, 2), 1)
    assert rehearsal.recorded == 4


def test_recordings_of_all_functions_make_room_where_memory_is_short(monkeypatch) -> None:
    monkeypatch.setattr(module, "FEWEST_RECORDINGS", 3)
    shares = {torch.device("cpu"): 1.0}
    monkeypatch.setattr(module, "free_share", shares.get)
    monkeypatch.setattr(module, "ALL_RECORDED", WeakSet())
    rehearsal, store = Rehearsal(), [torch.zeros(2, 8)]
    old, new = (Recorded(step, held=[0], capture=rehearsal) for _ in range(2))
    for calls, widths in ((old, (1, 2, 3, 4)), (new, (1, 2)), (old, (1,))):
        for width in widths:
            calls(store, *arguments(0, 2, width), 1)
    shares[torch.device("cpu")] = 0.01
    new(store, *arguments(0, 2, 3), 1)
    kept = {calls: [key[1][0] for key in calls.recordings] for calls in (old, new)}
    assert kept == {old: [torch.Size([1])], new: [torch.Size([n]) for n in (1, 2, 3)]}
    new(store, *arguments(0, 2, 4), 1)
    assert len(old.recordings) + len(new.recordings) == 4, "the last ones stay"


def test_rows_that_share_a_table_share_its_place() -> None:
    table = torch.arange(3).expand(4, 3)
    place = fixed_like(table)
    assert (place.shape, place.stride()) == (table.shape, table.stride())


def test_a_function_that_cannot_be_recorded_is_called_and_one_line_says_so(caplog) -> None:
    tried = []

    def refusing(function, given) -> None:
        tried.append(given)
        raise CaptureError("operation not permitted")

    calls = Recorded(step, held=[0], capture=refusing)
    store, plain = [torch.zeros(2, 8)], [torch.zeros(2, 8)]
    for seed in range(3):
        found = calls(store, *arguments(seed, 2, 3), 1)
        torch.testing.assert_close(found.rows, step(plain, *arguments(seed, 2, 3), 1).rows)
    torch.testing.assert_close(store, plain)
    assert (len(tried), len(caplog.messages)) == (1, 1)
    assert "operation not permitted" in caplog.text


def test_a_capture_that_failed_is_tried_again_at_the_8th_and_the_64th_call() -> None:
    tried, rehearsal = [], Rehearsal()

    def spoilt_twice(function, given):
        tried.append(count)
        if len(tried) <= 2:
            raise CaptureError("another library has synchronised the device")
        return rehearsal(function, given)

    calls = Recorded(step, held=[0], capture=spoilt_twice)
    store = [torch.zeros(2, 8)]
    for count in range(1, 101):
        found = calls(store, *arguments(count, 2, 3), 1)
        torch.testing.assert_close(found.rows, arguments(count, 2, 3)[1].sum(1))
    assert tried == [1, 8, 64]


def test_calls_that_have_a_recording_do_not_wait_for_those_that_cannot_be_recorded() -> None:
    rehearsal = Rehearsal()

    def refusing_wide_ones(function, given):
        if given[1].shape[0] == 5:
            raise CaptureError("operation not permitted")
        return rehearsal(function, given)

    calls, store = Recorded(step, held=[0], capture=refusing_wide_ones), [torch.zeros(2, 8)]
    for width in (3, 5):
        calls(store, *arguments(0, 2, width), 1)
    (made,) = calls.recordings.values()
    replays, made.replay = [], lambda: replays.append(1)
    calls(store, *arguments(0, 2, 3), 1)
    assert replays == [1]


class Workspaces:
    """How torch keeps cuBLAS' workspaces: by stream, until a graph dies that was captured there."""

    def __init__(self) -> None:
        self.of_stream: dict[str, int] = {}
        self.mapped: set[int] = set()  # those whose memory is still there
        self.in_pool: set[int] = set()  # which outlives the graphs
        self.is_capturing = False

    def used(self, stream: str) -> int:
        """The workspace that a product on a stream takes up."""
        if stream not in self.of_stream:
            self.of_stream[stream] = number = len(self.mapped | self.in_pool)
            (self.in_pool if self.is_capturing else self.mapped).add(number)
        return self.of_stream[stream]

    def clear(self, *streams: str) -> None:
        for stream in streams or [*self.of_stream]:
            if stream in self.of_stream:
                self.mapped.discard(self.of_stream.pop(stream))

    @contextmanager
    def graph(self, graph: object, pool: object, stream: str, capture_error_mode: str):
        self.is_capturing = True
        yield
        self.is_capturing = False
        finalize(graph, self.clear, stream)


class Graph:
    """Stands for a graph."""


@pytest.mark.parametrize("loss", ["the death of another graph", "the recording of a library"])
def test_a_graph_works_in_memory_that_nobody_else_frees(loss: str, monkeypatch) -> None:
    workspaces, capturing = Workspaces(), Capturing("aside", None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "graph", workspaces.graph)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", workspaces.clear, raising=False)
    graphs, found = [Graph(), Graph()], []
    for graph in graphs:
        workspaces.used("aside")  # by the calls before
        found.append(captured(graph, capturing, workspaces.used, ["aside"]))
    del graph
    if loss == "the death of another graph":
        graphs.pop()
    else:
        workspaces.clear()
    assert found[0] in workspaces.in_pool | workspaces.mapped
    assert not workspaces.of_stream, "a workspace of the pool is used outside of a capture"


def test_a_table_that_comes_again_unchanged_is_not_copied_again() -> None:
    recording = Recorded(step, held=[0], capture=Rehearsal())
    store, (column, table) = [torch.zeros(2, 8)], arguments(0, 2, 3)
    first = recording(store, column, table, 1).rows
    (made,) = recording.recordings.values()
    before = [place._version for place in made.places]
    recording(store, column, table, 1)
    recording(store, column[:], table, 1)  # another view of the same numbers
    assert [place._version for place in made.places] == before
    table += 1
    torch.testing.assert_close(recording(store, column, table, 1).rows, first + 3)
    with torch.inference_mode():
        later = table + 1
    torch.testing.assert_close(recording(store, column, later, 1).rows, first + 6)


def test_a_part_of_a_long_table_keeps_nothing_of_it() -> None:
    recording, column = Recorded(step, held=[0], capture=Rehearsal()), torch.arange(3)
    long = torch.zeros(MOST_KEPT, 3)
    parts = [long[place : place + 2] for place in (0, 2)]
    kept = [ref(part) for part in parts]
    recording([torch.zeros(2, 8)], column, parts[0], 1)
    recording([torch.zeros(2, 8)], column, parts[1], 1)
    del parts
    assert [part() for part in kept] == [None, None]


@pytest.mark.parametrize("way", ["another shape", "another function", "its first call"])
def test_nobody_waits_for_what_another_thread_compiles(way: str) -> None:
    """A call that has a recording goes on; one that has none waits for its turn to be made."""
    begun, go_on, rehearsal = Event(), Event(), Rehearsal()

    def slow(x: torch.Tensor) -> torch.Tensor:
        """Stands for code that is compiled when a wide tensor comes for the first time."""
        if len(x) > 1 and not begun.is_set():
            begun.set()
            assert go_on.wait(10)
        return x + 1

    calls = Recorded(slow, capture=rehearsal)
    other = calls if way == "another shape" else Recorded(lambda x: x + 1, capture=rehearsal)
    if way != "its first call":
        other(torch.zeros(1))
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(calls, torch.zeros(2))
        assert begun.wait(10)
        second = threads.submit(other, torch.ones(1))
        third = threads.submit(calls, torch.ones(3))
        if way == "its first call":  # which makes a recording, too
            sleep(0.05)
            assert not second.done()
        else:
            assert second.result(10).tolist() == [2.0], "while the first is compiled"
        assert not third.done() and not first.done()
        go_on.set()
        assert first.result(10).tolist() == [1.0] * 2
        assert (second.result(10).tolist(), third.result(10).tolist()) == ([2.0], [2.0] * 3)
    assert calls.longest > 0 and rehearsal.recorded == 3


def test_threads_that_need_a_recording_at_once_make_one() -> None:
    rehearsal, start, before = Rehearsal(), Barrier(4), Recorded.made
    calls = Recorded(lambda x: 2 * x, capture=rehearsal)

    def work(number: int) -> list[float]:
        start.wait()
        return calls(torch.full((3,), float(number))).tolist()

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(work, range(4))] == [[2.0 * number] * 3 for number in range(4)]
    assert (rehearsal.recorded, Recorded.made - before) == (1, 1)


def test_what_was_forgotten_is_recorded_again() -> None:
    rehearsal = Rehearsal()
    calls = Recorded(lambda x: 2 * x, capture=rehearsal)
    for _ in range(2):
        assert [calls(torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
        calls.forget()
    assert rehearsal.recorded == 2
