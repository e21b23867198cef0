"""The folder of a run: its settings, its logs, and the states to resume from.

`run.json` holds the resolved configuration with versions, `metrics.jsonl` one line per step,
`evaluation.jsonl` one line per evaluation, `state/step-N/` what resuming needs: it is written
whole, and checked before it is read.
"""

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from drafthead.core.errors import UserError
from drafthead.core.storage.files import json_lines, write_json, write_text
from drafthead.heads.formats.files import read_json
from drafthead.train.data.training_rows import Sources
from drafthead.train.settings import DURATIONS

logger = logging.getLogger(__name__)

KEPT_STATES = 2
PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    step: int = 0  # optimiser steps done
    seconds: float = 0.0  # of training, evaluating and saving
    supervised_tokens: int = 0


class SavedStates:
    """The folder `state/` of a run. Every process may read it, only the main process writes."""

    def __init__(self, path: Path):
        self.path = path

    def newest_first(self) -> list[Path]:
        """All states, the one with the most steps first."""
        return sorted(self.path.glob("step-*"), reverse=True)

    def newest_whole(self) -> Path:
        """The newest state whose files are as they were written; others are named in the log.

        Raises UserError when there is none.
        """
        for state in self.newest_first():
            problem = damage(state)
            if problem is None:
                return state
            logger.warning("%s is damaged (%s): an older state is taken", state, problem)
        raise UserError(
            f"no state in {self.path} is whole: restore one, or start again with "
            "train.overwrite=true"
        )

    @property
    def temporary(self) -> Path:
        """Return where a state is written before it is complete."""
        return self.path / "unfinished"

    def discard_temporary(self) -> None:
        """Remove what a killed run may have left incomplete."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def keep(self, progress: Progress, sources: Sources) -> None:
        """Make the temporary state the newest one, in one rename, and drop the oldest."""
        values = {**vars(progress), **vars(sources), "files": file_hashes(self.temporary)}
        write_text(self.temporary / PROGRESS_FILE, json.dumps(values) + "\n")
        final = self.path / f"step-{progress.step:09d}"
        shutil.rmtree(final, ignore_errors=True)
        self.temporary.rename(final)
        self.drop_old(KEPT_STATES)

    def drop_old(self, kept: int) -> None:
        """Remove all states but the newest `kept` ones."""
        for old in self.newest_first()[kept:]:
            shutil.rmtree(old)


def file_hashes(folder: Path) -> dict[str, str]:
    """A hash of every file in a folder, by its path within the folder."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != PROGRESS_FILE:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            hashes[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return hashes


def damage(state: Path) -> str | None:
    """Return what is wrong with the files of a state; None if nothing is."""
    try:
        recorded = json.loads((state / PROGRESS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{PROGRESS_FILE} cannot be read"
    found = file_hashes(state)
    for name, value in recorded.get("files", {}).items():
        if found.get(name) != value:
            return f"{name} is not what was written"
    return None


def read_progress(state: Path, sources: Sources) -> Progress:
    """The progress of a saved state; raises UserError when it was trained on other sources."""
    values = json.loads((state / PROGRESS_FILE).read_text(encoding="utf-8"))
    names = {"data": "the training data is", "target": "the weights of the target are"}
    for name, words in names.items():
        if values.pop(name, getattr(sources, name)) != getattr(sources, name):
            raise UserError(
                f"{words} no longer what {state} was trained with: restore them, choose another "
                "train.output, or start again with train.overwrite=true"
            )
    values.pop("files", None)
    return Progress(**values)


# Settings that change nothing of what is learnt.
FREE = ("train.overwrite", "target.placement", "target.memory", "target.offload_folder")
METRICS_FILE, EVALUATION_FILE = "metrics.jsonl", "evaluation.jsonl"
BEST_FOLDER, BEST_BY = "best", 16
PACKAGES = ("drafthead", "torch", "transformers", "accelerate", "safetensors")
Settings = dict[str, dict[str, Any]]  # section -> setting -> value


class BestEvaluation(NamedTuple):
    """The evaluation at which a head drafted best on the held-out data."""

    step: int
    tau: float  # of trees of `BEST_BY` nodes

    @classmethod
    def of(cls, record: dict[str, Any]) -> "BestEvaluation":
        """The evaluation of a line of the log."""
        return cls(record["step"], record["tau_tree"][str(BEST_BY)])


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
            if name not in FREE and before.get(key) != after.get(key):
                return f"{name} was {before.get(key)!r} and is now {after.get(key)!r}"
    return None


def is_longer(old: Settings, new: Settings) -> bool:
    """Tell whether the only difference is that the new run lasts longer, in the same unit."""
    for key in DURATIONS:
        before, after = old["train"].get(key), new["train"].get(key)
        if before is not None and after is not None and after > before:
            same = {**new, "train": {**new["train"], key: before}}
            return first_difference(old, same) is None
    return False


class RunFolder:
    """One run's folder. Every process may read it, only the main process writes."""

    def __init__(self, path: Path, settings: Settings):
        # Settings are compared after a round trip through JSON, where tuples become lists.
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.states = SavedStates(path / "state")

    def status(self, overwrite: bool) -> Literal["new", "resumable", "finished"]:
        """Return what the folder holds; "new" also means that an old run may be overwritten.

        A finished run that is to last longer is resumable: it goes on from its last step.
        Raises UserError when it holds another run that may not be overwritten.
        """
        if not (self.path / "run.json").exists():
            return "new"
        record = read_json(self.path / "run.json")
        finished = record.get("finished", False)
        if not finished and not self.states.newest_first():
            return "new"
        recorded = record["settings"]
        difference = first_difference(recorded, self.settings)
        if overwrite and (finished or difference):
            return "new"
        if finished and self.states.newest_first() and is_longer(recorded, self.settings):
            return "resumable"
        if difference:
            raise UserError(
                f"{self.path} holds a run with other settings ({difference}): choose another "
                "train.output, or discard that run with train.overwrite=true"
            )
        return "finished" if finished else "resumable"

    def begin(self, resumed: Progress | None) -> None:
        """Write `run.json` and remove what was logged after the state that the run resumes from."""
        self.states.discard_temporary()  # it may be what filled the disk
        if resumed is None:
            shutil.rmtree(self.states.path, ignore_errors=True)
        self.states.path.mkdir(parents=True, exist_ok=True)
        step = resumed.step if resumed else 0
        for name in (METRICS_FILE, EVALUATION_FILE):
            cut_log(self.path / name, step)
        if resumed is None:
            self.drop_best()
        self._write_record(finished=False)

    def drop_best(self) -> None:
        """Remove the best head of a run, because it is the last one or of a discarded run."""
        shutil.rmtree(self.path / BEST_FOLDER, ignore_errors=True)

    def finish(self) -> None:
        """Mark the run as finished; of its states the last one stays, to extend the run from."""
        self.states.drop_old(kept=1)
        self._write_record(finished=True)

    def _write_record(self, finished: bool) -> None:
        record = {**provenance(self.settings), "finished": finished}
        write_json(self.path / "run.json", record)

    def best_evaluation(self) -> "BestEvaluation | None":
        """The evaluation with the highest tau in the log; None without any."""
        found = map(BestEvaluation.of, json_lines(self.path / EVALUATION_FILE))
        return max(found, key=lambda one: one.tau, default=None)

    def log(self, name: str, record: dict[str, Any]) -> None:
        """Append one line to a log."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def cut_log(path: Path, last_step: int) -> None:
    """Keep the complete lines of a log up to a step, so that no step is logged twice."""
    kept = [record for record in json_lines(path) if record["step"] <= last_step]
    write_text(path, "".join(json.dumps(record) + "\n" for record in kept))


@dataclass(frozen=True)
class RunSummary:
    """A finished or unfinished run. No seconds include loading or the last evaluation."""

    steps: int
    seconds: float
    supervised_tokens: int
    supervised_tokens_per_s: float
    target_share: float  # of the steps' time, in the target's forward passes
    evaluation: dict[str, Any] | None  # the last one, see train.evaluation.Evaluation


def summarize(folder: Path) -> RunSummary:
    """Add up the log of a run; raises UserError when it holds no step."""
    tokens, in_steps, in_target = 0, 0.0, 0.0
    record: dict[str, Any] = {}
    for record in json_lines(folder / METRICS_FILE):
        step_seconds = (record["supervised_tokens"] - tokens) / record["supervised_tokens_per_s"]
        tokens = record["supervised_tokens"]
        in_steps += step_seconds
        in_target += step_seconds * record["target_share"]
    if not record:
        raise UserError(f"{folder / METRICS_FILE} holds no training step")
    evaluations = list(json_lines(folder / EVALUATION_FILE))
    return RunSummary(
        steps=record["step"],
        seconds=record["seconds"],
        supervised_tokens=tokens,
        supervised_tokens_per_s=tokens / record["seconds"],
        target_share=in_target / in_steps,
        evaluation=evaluations[-1] if evaluations else None,
    )
