"""The folder of a build: its choices, which stages are done, and what they found.

`build.json` is written whole after each stage, so a kill at any moment costs the stage at work, and
of that what its own files do not keep.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from drafthead.heads.errors import UserError
from drafthead.heads.formats.files import read_json
from drafthead.heads.storage.files import write_text

RECORD, CHOICES = "build.json", "build.yaml"


@dataclass(frozen=True)
class Choices:
    """What the user chose; it decides everything else, with the speed of the machine."""

    target: str
    dtype: str
    device: str
    prompts: tuple[str, ...]  # files; none: the target invents them
    max_new_tokens: int
    seed: int
    family: str
    minutes: float
    compile: bool

    def __post_init__(self) -> None:
        if self.minutes <= 0:
            raise UserError(f"a build needs time: give more than {self.minutes:g} minutes")


STAGES = {
    "prompts": "prompts, a share of them held out",
    "held out": "answers to the held-out prompts",
    "plan": "speed of learning, memory, division of the time",
    "answers": "answers to learn from",
    "ngrams": "table of n-grams, which needs no training",
    "train": "training of the head",
    "evaluate": "evaluation, calibration of the trees",
    "race": "race on prompts that nothing has seen",
    "export": "export check",
    "report": "report and model card",
}
# The first stage that a choice touches. Others touch all: a folder belongs to one of each.
TOUCHED = {"minutes": "plan", "family": "plan", "compile": "race"}


class BuildFolder:
    """What a folder holds of a build."""

    def __init__(self, path: Path):
        self.path = path
        self.stages: dict[str, dict[str, Any]] = {}  # facts of those that are done
        self.commands: dict[str, str] = {}
        self.repeats = False  # a stage is to be done again, with other choices

    def begin(self, choices: Choices) -> None:
        """Read what is done; stages that a changed choice touches are to be done again.

        Raises UserError for a choice that cannot change.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.choices = json.loads(json.dumps(asdict(choices)))
        if (self.path / RECORD).exists():
            record = read_json(self.path / RECORD)
            self.stages, self.commands = record["stages"], record["commands"]
            self._repeat_from(record["choices"])
        self._save()

    def _repeat_from(self, before: Mapping[str, Any]) -> None:
        changed = [name for name, value in self.choices.items() if before.get(name) != value]
        for name in changed:
            if name not in TOUCHED:
                option = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{self.path} was begun with {option} {before.get(name)!r}, now "
                    f"{self.choices[name]!r}: give the same, or choose another --output"
                )
        order = list(STAGES)
        first = min((order.index(TOUCHED[name]) for name in changed), default=len(order))
        self.repeats = any(name in self.stages for name in order[first:])
        for name in order[first:]:
            self.stages.pop(name, None)

    def finish(self, stage: str, seconds: float, facts: Mapping[str, Any]) -> None:
        """Note that a stage is done, how long it took, and what it found."""
        self.stages[stage] = {"seconds": seconds, **facts}
        self._save()

    def command(self, stage: str, words: Sequence[object]) -> None:
        """Note the command that does a stage by hand."""
        self.commands[stage] = shlex.join(["drafthead", *map(str, words)])

    @property
    def seconds(self) -> float:
        """What the stages that are done took."""
        return sum(facts["seconds"] for facts in self.stages.values())

    def _save(self) -> None:
        record = {"choices": self.choices, "stages": self.stages, "commands": self.commands}
        write_text(self.path / RECORD, json.dumps(record, indent=2) + "\n")
        lines = {
            "choices": self.choices,
            "found": {name: facts for name, facts in self.stages.items() if len(facts) > 1},
            "by_hand": self.commands,
        }
        text = "# A build of `drafthead build`: its choices, what it found, its stages by hand.\n"
        text += yaml.safe_dump(lines, sort_keys=False, width=1000, allow_unicode=True)
        write_text(self.path / CHOICES, text)
