"""A race that has not ended, in a file: the same race goes on with the answers that it had."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from drafthead.heads.storage.files import write_text
from drafthead.heads.target.target import Target
from drafthead.infer.engine.results import DecodeStats
from drafthead.infer.loaded import NamedDraft
from drafthead.lab.races.contestants import Answers
from drafthead.lab.races.record import Prompt
from drafthead.train.jobs.weights import weights_fingerprint


class Turn(NamedTuple):
    """A contestant's answers to a batch of prompts, and the memory that was in use."""

    answers: Answers
    peak_memory_bytes: int


Turns: TypeAlias = Mapping[str, Turn]  # of one batch, by the contestants' modes


class Place(NamedTuple):
    """Which batch of a race it is."""

    temperature: float
    round: int
    batch: int


class UnfinishedRace:
    """The batches that all contestants have decoded: a line of the file for each.

    A batch counts only when the last contestant has decoded it, since they are compared in the same
    minutes. The first line holds what the race is made of.
    """

    def __init__(self, path: Path, made_of: dict[str, Any]):
        """Go on with what the file holds of the same race; anything else begins again.

        `changed` are the names of what is no longer as it was in the file, if there is one.
        """
        self.path = path
        self.batches: dict[Place, Turns] = {}
        wanted = json.loads(json.dumps(made_of))
        there = _lines(path)
        first = there[0] if there and isinstance(there[0], dict) else {}
        self.changed = [name for name in {**wanted, **first} if wanted.get(name) != first.get(name)]
        self.begun = bool(there)
        kept = [] if self.changed else there[1:]
        for place, turns in kept:
            self.batches[Place(*place)] = {mode: _turn(*turn) for mode, turn in turns.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole lines only: what a stop has cut off would spoil the next line.
        write_text(path, "".join(json.dumps(line) + "\n" for line in (wanted, *kept)))

    def add(self, place: Place, turns: Turns) -> None:
        """Keep a batch that all contestants have decoded."""
        self.batches[place] = turns
        line = [place, {mode: [asdict(answers), peak] for mode, (answers, peak) in turns.items()}]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def end(self) -> None:
        """The race is over, and its report is written: the next one begins from nothing."""
        self.path.unlink(missing_ok=True)


def _lines(path: Path) -> list[Any]:
    """The lines of a file, up to one that a stop has cut off; none without a file."""
    if not path.exists():
        return []
    lines: list[Any] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _turn(answers: dict[str, Any], peak_memory_bytes: int) -> Turn:
    """A turn as `UnfinishedRace.add` wrote it."""
    stats = answers["stats"] and DecodeStats(**answers["stats"])
    return Turn(Answers(**{**answers, "stats": stats}), peak_memory_bytes)


def begun_race(
    path: Path,
    run: dict[str, object],
    questions: Sequence[Prompt],
    target: Target,
    drafts: Sequence[NamedDraft],
) -> UnfinishedRace:
    """The race that an earlier run has begun, or a new one; a line says if there was one.

    It is the same race if command, machine and versions in `run`, prompts, the target's weights and
    the files of drafters are the same. Drafters on the hub are known by their names alone.
    """
    made_of = {
        **run,
        "prompts": questions,
        "weights": weights_fingerprint(target),
        "files": {str(draft): states(Path(draft.argument)) for draft in drafts if draft.argument},
    }
    race = UnfinishedRace(path, made_of)
    if race.begun and race.changed:
        print(f"{path} is of another race (not the same: {', '.join(race.changed)}): begins again")
    elif race.batches:
        print(f"{path}: goes on after {len(race.batches)} batches of prompts, which are kept")
    return race


def states(path: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a file or of the files in a folder; none of what is not here."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path] * path.is_file()
    found = [(file.relative_to(path).as_posix(), file.stat()) for file in files if file.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
