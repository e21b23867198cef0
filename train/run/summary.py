"""The figures of a training run, read from the logs in its folder."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.heads.errors import UserError
from drafthead.train.run.folder import EVALUATION_FILE, METRICS_FILE


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
    for record in read_log(folder / METRICS_FILE):
        step_seconds = (record["supervised_tokens"] - tokens) / record["supervised_tokens_per_s"]
        tokens = record["supervised_tokens"]
        in_steps += step_seconds
        in_target += step_seconds * record["target_share"]
    if not record:
        raise UserError(f"{folder / METRICS_FILE} holds no training step")
    evaluations = list(read_log(folder / EVALUATION_FILE))
    return RunSummary(
        steps=record["step"],
        seconds=record["seconds"],
        supervised_tokens=tokens,
        supervised_tokens_per_s=tokens / record["seconds"],
        target_share=in_target / in_steps,
        evaluation=evaluations[-1] if evaluations else None,
    )


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log; none if there is no log."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
