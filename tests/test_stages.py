"""The first stage stays short, and notices what the cases of the second would notice."""

import pytest
import yaml
from durations import committed
from mutations import ROOT, main
from stages import FILE, Moved, Mutation, read_stages

BUDGET = 900  # processor seconds: two cores are done in eight minutes
MOVED, MUTATIONS = read_stages()


def test_the_first_stage_keeps_to_its_budget() -> None:
    assert committed().total() <= BUDGET


@pytest.mark.parametrize("moved", MOVED, ids=lambda moved: moved.place)
def test_what_is_moved_exists(moved: Moved) -> None:
    file, _, test = moved.place.partition("::")
    assert f"def {test}" in (ROOT / file).read_text()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place_and_the_first_stage_has_its_test(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    file, _, test = mutation.fails.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()
    assert not any(moved.holds(mutation.fails) for moved in MOVED)


def test_nothing_is_moved_without_a_mutation() -> None:
    for entry in yaml.safe_load(FILE.read_text()).values():
        assert entry["mutations"]


def test_a_moved_test_keeps_the_cases_that_are_named() -> None:
    moved = Moved("tests/a.py::test_x", ("one-*", "[2, 1]"))
    ids = ("one-2", "two", "[2, 1]", "2")
    assert [moved.holds(f"tests/a.py::test_x[{name}]") for name in ids] == [
        False,
        True,
        False,
        True,
    ]
    assert not moved.holds("tests/a.py::test_xy[two]")
    whole = Moved("tests/a.py", ("test_x",))
    assert not whole.holds("tests/a.py::test_x[two]") and whole.holds("tests/a.py::test_y")


def test_a_name_that_no_mutation_has_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no entry of the name 'a pass'"):
        main(["a pass"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted({mutation.name for mutation in MUTATIONS}))
def test_the_first_stage_notices_a_mutation(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 0, capsys.readouterr().out
