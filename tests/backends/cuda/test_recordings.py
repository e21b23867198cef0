"""Recorded calls, with a rehearsal in place of the GPU: it repeats the call at fixed addresses."""

from typing import NamedTuple
from weakref import ref

import torch
from rehearsal import Rehearsal

from drafthead.backends.cuda.recordings import MOST_KEPT, CaptureError, Recordings, fixed_like


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
    calls = Recordings(step, held=[0], capture=rehearsal)
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
    calls = Recordings(step, held=[0], capture=rehearsal)
    stores = [[torch.zeros(2, 8)], [torch.zeros(2, 8)]]
    for store in (*stores, *stores):
        calls(store, *arguments(0, 2, 3), 1)
    assert rehearsal.recorded == 2
    assert calls(stores[0], *arguments(0, 2, 3), 5).rows.equal(arguments(0, 2, 3)[1].sum(1) * 5)
    assert rehearsal.recorded == 3


def test_memory_that_comes_back_in_another_shape_asks_for_another_recording() -> None:
    rehearsal, memory = Rehearsal(), torch.zeros(32)
    calls = Recordings(step, held=[0], capture=rehearsal)
    for store in (memory[:16].view(2, 8), memory.view(2, 16)):
        calls([store], *arguments(0, 2, 3), 1)
    assert rehearsal.recorded == 2
    column, table = arguments(0, 2, 3)
    torch.testing.assert_close(memory.view(2, 16)[:, column], table)


def test_a_constant_of_another_type_asks_for_another_recording() -> None:
    rehearsal, store = Rehearsal(), [torch.zeros(2, 8)]
    calls = Recordings(step, held=[0], capture=rehearsal)
    for scale in (1, True):
        calls(store, *arguments(0, 2, 3), scale)
    assert rehearsal.recorded == 2


def test_a_place_has_the_gaps_of_its_argument() -> None:
    part = torch.zeros(3, 8)[:, 2:5]
    assert fixed_like(part).stride() == part.stride()


def test_the_recording_that_was_not_used_for_longest_makes_room() -> None:
    rehearsal = Rehearsal()
    calls, store = Recordings(step, held=[0], capture=rehearsal, most=2), [torch.zeros(2, 8)]
    for width in (1, 2, 1, 3, 1):
        calls(store, *arguments(0, 2, width), 1)
    assert rehearsal.recorded == 3
    calls(store, *arguments(0, 2, 2), 1)
    assert rehearsal.recorded == 4


def test_rows_that_share_a_table_share_its_place() -> None:
    table = torch.arange(3).expand(4, 3)
    place = fixed_like(table)
    assert (place.shape, place.stride()) == (table.shape, table.stride())


def test_a_function_that_cannot_be_recorded_is_called_and_one_line_says_so(caplog) -> None:
    tried = []

    def refusing(function, given) -> None:
        tried.append(given)
        raise CaptureError("operation not permitted")

    calls = Recordings(step, held=[0], capture=refusing)
    store, plain = [torch.zeros(2, 8)], [torch.zeros(2, 8)]
    for seed in range(3):
        found = calls(store, *arguments(seed, 2, 3), 1)
        torch.testing.assert_close(found.rows, step(plain, *arguments(seed, 2, 3), 1).rows)
    torch.testing.assert_close(store, plain)
    assert (len(tried), len(caplog.messages)) == (1, 1)
    assert "operation not permitted" in caplog.text


def test_a_table_that_comes_again_unchanged_is_not_copied_again() -> None:
    recording = Recordings(step, held=[0], capture=Rehearsal())
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
    recording, column = Recordings(step, held=[0], capture=Rehearsal()), torch.arange(3)
    long = torch.zeros(MOST_KEPT, 3)
    parts = [long[place : place + 2] for place in (0, 2)]
    kept = [ref(part) for part in parts]
    recording([torch.zeros(2, 8)], column, parts[0], 1)
    recording([torch.zeros(2, 8)], column, parts[1], 1)
    del parts
    assert [part() for part in kept] == [None, None]
