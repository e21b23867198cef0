"""Which tests wait for the second stage: each entry of `stages.yaml` moves some for a mutation.

A mutation is a wrong line in a copy of the code. The first stage has a test that fails then, so a
claim is not left unproved by moving most of its cases. `tests/mutations.py` tries the mutations.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

FILE = Path(__file__).with_name("stages.yaml")


@dataclass(frozen=True)
class Mutation:
    """A wrong text instead of a right one, and the test of the first stage that notices."""

    name: str
    file: str
    old: str
    new: str
    fails: str


@dataclass(frozen=True)
class Moved:
    """What of a test or a file waits for the second stage: all but a few cases or tests."""

    place: str  # "tests/x.py" or "tests/x.py::test"
    stays: tuple[str, ...]  # names of tests or ids of cases; `*` stands for anything

    def holds(self, nodeid: str) -> bool:
        """Whether a test of this name waits for the second stage."""
        if not nodeid.startswith(self.place) or nodeid[len(self.place) :][:1] not in ("", ":", "["):
            return False
        rest = nodeid[len(self.place) :].removeprefix("::")
        rest = rest[1:-1] if rest.startswith("[") else rest
        return not any(re.fullmatch(matching(name), rest) for name in self.stays)


def matching(name: str) -> str:
    """The regular expression of a name with `*`; a test without cases stands for all its cases."""
    pattern = ".*".join(map(re.escape, name.split("*")))
    return pattern + (r"(\[.*\])?" if name.startswith("test_") and "[" not in name else "")


def more(*values: object, **options: Any) -> Any:
    """A case that waits for the second stage."""
    return pytest.param(*values, marks=pytest.mark.thorough, **options)


def read_stages() -> tuple[list[Moved], list[Mutation]]:
    """All that is moved, and the mutations that were the condition."""
    moved, mutations = [], []
    for name, entry in yaml.safe_load(FILE.read_text()).items():
        moved += [Moved(place, tuple(stays)) for place, stays in entry["moved"].items()]
        mutations += [Mutation(name, **mutation) for mutation in entry["mutations"]]
    return moved, mutations


def moved_by_file() -> dict[str, list[Moved]]:
    """What is moved, by the file that it stands in."""
    found: dict[str, list[Moved]] = {}
    for moved in read_stages()[0]:
        found.setdefault(moved.place.partition("::")[0], []).append(moved)
    return found
