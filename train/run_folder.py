"""The folder of a run: its settings, its logs, and the states to resume from.

`run.json` holds the resolved configuration with versions, `metrics.jsonl` one line per step,
`evaluation.jsonl` one line per evaluation, `state/step-N/` what resuming needs.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from drafthead.heads.errors import UserError
from drafthead.heads.files import write_text
from drafthead.heads.formats.files import read_json

METRICS_FILE, EVALUATION_FILE = "metrics.jsonl", "evaluation.jsonl"
KEPT_STATES = 2
PACKAGES = ("drafthead", "torch", "transformers", "accelerate", "safetensors")
Settings = dict[str, dict[str, Any]]  # section -> setting -> value


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0  # optimiser steps done
    seconds: float = 0.0  # of training, evaluating and saving
    supervised_tokens: int = 0


def provenance(settings: Settings) -> dict[str, Any]:
    """The settings of a run, with command, commit and versions."""
    return {
        "settings": settings,
        "argv": sys.argv,
        "git_commit": git_commit(),
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in PACKAGES},
    }


def git_commit() -> str | None:
    """The commit of the repository that holds this file, if there is one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def first_difference(old: Settings, new: Settings) -> str | None:
    """The first setting that differs, with both values; None when the runs are the same."""
    for section in sorted({*old, *new}):
        before, after = old.get(section, {}), new.get(section, {})
        for key in sorted({*before, *after}):
            name = f"{section}.{key}"
            if name != "train.overwrite" and before.get(key) != after.get(key):
                return f"{name} was {before.get(key)!r} and is now {after.get(key)!r}"
    return None


class RunFolder:
    """One run's folder. Every process may read it, only the main process writes."""

    def __init__(self, path: Path, settings: Settings, defaults: Settings):
        """`defaults` holds values for settings that an older record lacks."""
        # Settings are compared after a round trip through JSON, where tuples become lists.
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.defaults: Settings = json.loads(json.dumps(defaults))
        self.states = path / "state"

    def status(self, overwrite: bool) -> Literal["new", "resumable", "finished"]:
        """What the folder holds; "new" also means that an old run may be overwritten.

        Raises UserError when it holds another run that may not be overwritten.
        """
        if not (self.path / "run.json").exists():
            return "new"
        record = read_json(self.path / "run.json")
        finished = record.get("finished", False)
        if not finished and self.latest_state() is None:
            return "new"
        difference = first_difference(self._completed(record["settings"]), self.settings)
        if overwrite and (finished or difference):
            return "new"
        if difference:
            raise UserError(
                f"{self.path} holds a run with other settings ({difference}): choose another "
                "train.output, or discard that run with train.overwrite=true"
            )
        return "finished" if finished else "resumable"

    def _completed(self, recorded: Settings) -> Settings:
        """Recorded settings, with the defaults of settings that the record lacks."""
        return {
            name: {**self.defaults.get(name, {}), **recorded.get(name, {})}
            for name in {*self.defaults, *recorded}
        }

    def begin(self, resumed: Progress | None) -> None:
        """Write `run.json` and remove what was logged after the state that the run resumes from."""
        if resumed is None:
            shutil.rmtree(self.states, ignore_errors=True)
        self.states.mkdir(parents=True, exist_ok=True)
        step = resumed.step if resumed else 0
        for name in (METRICS_FILE, EVALUATION_FILE):
            cut_log(self.path / name, step)
        self._write_record(finished=False)

    def finish(self) -> None:
        """Mark the run as finished."""
        self._write_record(finished=True)

    def _write_record(self, finished: bool) -> None:
        record = {**provenance(self.settings), "finished": finished}
        write_text(self.path / "run.json", json.dumps(record, indent=2) + "\n")

    def log(self, name: str, record: dict[str, Any]) -> None:
        """Append one line to a log."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def latest_state(self) -> Path | None:
        """The state with the most steps."""
        return max(self.states.glob("step-*"), default=None)

    def temporary_state(self) -> Path:
        """Where a state is written before it is complete."""
        return self.states / "unfinished"

    def discard_temporary(self) -> None:
        """Remove what a killed run may have left incomplete."""
        shutil.rmtree(self.temporary_state(), ignore_errors=True)

    def keep_state(self, progress: Progress, fingerprint: str) -> None:
        """Make the temporary state the latest one, in one rename, and drop the oldest."""
        values = {**vars(progress), "data": fingerprint}
        write_text(self.temporary_state() / "progress.json", json.dumps(values) + "\n")
        final = self.states / f"step-{progress.step:09d}"
        shutil.rmtree(final, ignore_errors=True)
        self.temporary_state().rename(final)
        for old in sorted(self.states.glob("step-*"))[:-KEPT_STATES]:
            shutil.rmtree(old)


def read_progress(state: Path, fingerprint: str) -> Progress:
    """The progress of a saved state; raises UserError when it was trained on other data."""
    values = read_json(state / "progress.json")
    if values.pop("data") != fingerprint:
        raise UserError(
            f"the training data is no longer that of {state}: restore it, choose "
            "another train.output, or remove that folder"
        )
    return Progress(**values)


def cut_log(path: Path, last_step: int) -> None:
    """Keep the complete lines of a log up to a step, so that no step is logged twice."""
    lines = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= last_step:
                    lines.append(line + "\n")
            except json.JSONDecodeError:  # the line that a killed run was writing
                break
    write_text(path, "".join(lines))
