"""The folder of a build: its choices, which stages are done, and what they found.

`build.yaml` is written whole after each stage, so a kill at any moment costs the stage at work, and
of that what its own files do not keep.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_text
from drafthead.lab.building.choices import Choices

RECORD = "build.yaml"
TITLE = "# What `drafthead build` has chosen and found here, and how a stage is done by hand.\n"
Facts = dict[str, Any]


class Stage(NamedTuple):
    """A stage of a build."""

    words: str
    share: float  # of the time, before anything is known
    graphs: int = 0  # of the size of the target that it compiles


STAGES = {
    "prompts": Stage("prompts, a share of them held out", 0.03),
    "held out": Stage("answers to the held-out prompts", 0.06),
    "plan": Stage("speed of learning, memory, division of the time", 0.05),
    "answers": Stage("answers to learn from", 0.2),
    "ngrams": Stage("table of n-grams, which needs no training", 0.01),
    "train": Stage("training of the head", 0.35),
    "evaluate": Stage("evaluation, calibration of the trees", 0.05, graphs=2),
    "race": Stage("race on prompts that nothing has seen", 0.2, graphs=2),
    "export": Stage("export check", 0.03),
    "report": Stage("report and model card", 0.02),
}
# The first stage that a choice touches. Others touch all: a folder belongs to one of each.
TOUCHED = {"minutes": "plan", "family": "plan", "init_from": "plan", "compile": "race"}


class BuildFolder:
    """The folder of a build."""

    def __init__(self, path: Path):
        self.path = path
        self.kept: Facts = {}  # see `once`
        self.stages: dict[str, Facts] = {}  # those that are done, by what they found

    def begin(self, choices: Choices) -> None:
        """Read what is done; stages that a changed choice touches are to be done again.

        Nothing is written here. Raises UserError for a choice that cannot change,
        and for a record that cannot be read.
        """
        self.choices: Facts = json.loads(
            json.dumps({"target": choices.target, **asdict(choices)})  # a list for a tuple
        )
        file = self.path / RECORD
        if file.exists():
            try:
                record = yaml.safe_load(file.read_text(encoding="utf-8"))
                before, self.stages = record["choices"], record["stages"]
                self.kept = record.get("kept", {})
            except (yaml.YAMLError, KeyError, TypeError) as error:
                raise UserError(f"{file} cannot be read: restore it, or remove it") from error
            self._repeat_from(before)

    def _repeat_from(self, before: Mapping[str, Any]) -> None:
        changed = [name for name, value in self.choices.items() if before.get(name) != value]
        for name in changed:
            if name not in TOUCHED:
                if not self.stages:  # nothing is there that it could be wrong for
                    self.kept = {}
                    return
                option = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{self.path} was started with {option} {before.get(name)!r}, now "
                    f"{self.choices[name]!r}: give the same, or choose another --output"
                )
        order = list(STAGES)
        first = min((order.index(TOUCHED[name]) for name in changed), default=len(order))
        for name in order[first:]:
            self.stages.pop(name, None)

    def finish(self, stage: str, seconds: float, facts: Facts) -> None:
        """Note that a stage is done, how long it took, and what it found."""
        self.stages[stage] = {"seconds": round(seconds, 2), **facts}
        self._save()

    def once(self, name: str, find: Callable[[], int]) -> int:
        """A number that is found once: a stage that was killed goes on with it."""
        if name not in self.kept:
            self.kept[name] = find()
            self._save()
        return int(self.kept[name])

    def fact(self, stage: str, name: str) -> Any:
        """Return what a stage that is done has found; None where it has not."""
        return self.stages.get(stage, {}).get(name)

    @property
    def seconds(self) -> float:
        """Return what the stages that are done took."""
        return sum(facts["seconds"] for facts in self.stages.values())

    def _save(self) -> None:
        record = {"choices": self.choices, "kept": self.kept, "stages": self.stages}
        text = yaml.safe_dump(record, sort_keys=False, width=1000, allow_unicode=True)
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / RECORD, TITLE + text)
