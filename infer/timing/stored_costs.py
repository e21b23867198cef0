"""What was learnt about the cost of steps, kept for the next time that the same models run here."""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.storage.disk_cache import cache_folder, read_cached, write_cached
from drafthead.heads.target.target import Target
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.step_costs import StepCosts
from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.infer.verifiers import Verifier

logger = logging.getLogger(__name__)

# Goes up when steps change or their costs are stored in another way: older files are not read.
COSTS_VERSION = 6


@dataclass(frozen=True)
class StepKind:
    """What the time of a step depends on, besides its size, the models and the machine."""

    rule: str
    rows: int  # see `rows_that_share`
    filters: bool  # top-k, top-p, ...
    processors: bool

    @classmethod
    def of(cls, run: BatchRun, rule: Verifier) -> "StepKind":
        """The kind of a batch's steps."""
        request, name, rows = run.request, rule.name, run.most_rows
        if request.beams is not None:
            name, rows = f"{request.beams.num_beams} beams", rows * request.beams.num_beams
        rows = rows_that_share(rows)
        return cls(name, rows, not request.sampling.whole, bool(request.processors))

    def distance(self, other: "StepKind") -> float:
        """How much another kind differs: 1 for each property, and for each doubling of the rows."""
        mine, others = astuple(self), astuple(other)
        differing = sum(a != b for a, b in zip(mine, others, strict=True))
        return differing - (self.rows != other.rows) + abs(math.log2(self.rows / other.rows))


def rows_that_share(batch: int) -> int:
    """The number of rows as which a batch counts: 3 rows and 4 share what they learn."""
    return 2 ** (batch - 1).bit_length()


def costs_file(target: Target, drafter: Drafter) -> Path:
    """Where the costs of these models' steps on this machine are kept."""
    about = [
        COSTS_VERSION,
        describe_machine(),
        describe_versions(),
        target.config.to_diff_dict(),
        target.precision,
        type(target).__name__,
        repr(drafter),
        [astuple(budget) for budget in drafter.budgets],
    ]
    digest = hashlib.sha256(json.dumps(about, default=str, sort_keys=True).encode()).hexdigest()
    return cache_folder("step_costs") / f"{digest[:16]}.json"


def read_costs(path: Path, drafter: Drafter) -> dict[StepKind, StepCosts]:
    """What was kept of each kind of steps; nothing, with a warning, if the file is damaged."""
    try:
        return {kind_from(entry): costs_from(entry, drafter) for entry in entries_in(path)}
    except DAMAGE:
        logger.warning("%s is damaged; the costs of steps are learnt again", path)
        return {}


# What reading may raise when a file is not as it was written.
DAMAGE = (ValueError, TypeError, KeyError, ArithmeticError, RecursionError)


def entries_in(path: Path) -> list[dict[str, Any]]:
    """The entries of a file, as they are; none if there is no file. May raise any of DAMAGE."""
    text = read_cached(path)
    return [] if text is None else list(json.loads(text))


def kind_from(entry: Mapping[str, Any]) -> StepKind:
    """The kind of an entry; may raise any of DAMAGE."""
    kind = StepKind(**entry["kind"])
    if not isinstance(kind.rule, str) or type(kind.rows) is not int or kind.rows < 1:
        raise ValueError("no kind of steps")
    return kind


def costs_from(entry: Mapping[str, Any], drafter: Drafter) -> StepCosts:
    """The costs of an entry; may raise any of DAMAGE."""
    costs = StepCosts(drafter.budgets)
    mean, covariance = (np.array(entry[name], float) for name in ("mean", "covariance"))
    if mean.shape != costs.mean.shape or covariance.shape != costs.guess.shape:
        raise ValueError("no costs of these sizes")
    if not np.abs(mean).max() < MOST_LOG_SECONDS or not np.abs(covariance).max() < MOST_VARIANCE:
        raise ValueError("impossible costs")
    if not np.array_equal(covariance, covariance.T) or np.linalg.eigvalsh(covariance)[0] < -1e-6:
        raise ValueError("no covariance")
    costs.go_on_from(mean, covariance)
    costs.was_timed = entry["was_timed"] is True
    return costs


# No step takes less than a nanosecond or more than ten years.
MOST_LOG_SECONDS, MOST_VARIANCE = 21.0, 400.0


def write_costs(path: Path, learnt: Mapping[StepKind, StepCosts]) -> None:
    """Keep the costs where that is possible, beside other kinds that another process has kept."""
    try:
        others = [entry for entry in entries_in(path) if kind_from(entry) not in learnt]
    except DAMAGE:
        others = []
    entries = [entry_of(kind, costs) for kind, costs in learnt.items()]
    write_cached(path, json.dumps(others + entries))


def entry_of(kind: StepKind, costs: StepCosts) -> dict[str, Any]:
    """One kind of steps as it is kept."""
    with costs.lock:
        mean, covariance = costs.mean, costs.covariance
    return {
        "kind": asdict(kind),
        "was_timed": costs.was_timed,
        "mean": mean.tolist(),
        "covariance": ((covariance + covariance.T) / 2).round(8).tolist(),
    }
