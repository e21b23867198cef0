"""The file of a race that was stopped."""

import json
from pathlib import Path

import pytest

from drafthead.infer.engine.stats import DecodeStats
from drafthead.lab.races.race import RaceBatch, RacedAnswers, RaceTurn, UnfinishedRace

MADE_OF = {"command": "compare", "prompts": [([1, 2], None)]}
STATS = DecodeStats({"draft": 0.1}, 1.5, 3, 9, 0, [[1, 2], [3]], [2, 2])
TURNS = {
    "plain": RaceTurn(RacedAnswers([[4, 5], [6]], 3, 1 / 3, 0.1, STATS), 7),
    "generate": RaceTurn(RacedAnswers([[4, 5], [6]], 3, 0.7, 0.1), 9),
}
FIRST, SECOND = RaceBatch(0.0, 0, 0), RaceBatch(0.0, 0, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of two batches."""
    race = UnfinishedRace(tmp_path / "race" / "unfinished.jsonl", MADE_OF)
    assert not race.begun
    for place in (FIRST, SECOND):
        race.add(place, TURNS)
    return race.path


def test_the_same_race_has_its_answers(path: Path) -> None:
    race = UnfinishedRace(path, MADE_OF)
    assert race.begun and not race.changed
    assert race.batches == {FIRST: TURNS, SECOND: TURNS}


def test_another_race_begins_anew_and_tells_what_has_changed(path: Path) -> None:
    race = UnfinishedRace(path, MADE_OF | {"prompts": [], "more": 1})
    assert race.changed == ["prompts", "more"] and not race.batches
    assert len(path.read_text().splitlines()) == 1


def test_a_line_that_was_cut_off_is_dropped_for_good(path: Path) -> None:
    path.write_text(path.read_text()[:-20])
    race = UnfinishedRace(path, MADE_OF)
    assert race.batches.keys() == {FIRST}
    race.add(SECOND, TURNS)
    assert UnfinishedRace(path, MADE_OF).batches == {FIRST: TURNS, SECOND: TURNS}


def test_a_file_of_anything_else_begins_anew(path: Path) -> None:
    for text in ("", "no JSON", json.dumps([1])):
        path.write_text(text)
        assert not UnfinishedRace(path, MADE_OF).batches


def test_the_end_removes_the_file(path: Path) -> None:
    UnfinishedRace(path, MADE_OF).end()
    assert not path.exists()
