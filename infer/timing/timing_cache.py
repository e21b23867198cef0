"""Step times of this machine, stored for the next time that the same models run on it."""

import hashlib
import json
import logging
from pathlib import Path

from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.files import cache_folder, write_text
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Budget
from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.infer.timing.step_timing import StepSeconds, time_steps
from drafthead.infer.verifiers import Verifier

logger = logging.getLogger(__name__)

# Goes up when steps change or are timed in another way: times of an older version are not read.
TIMING_VERSION = 4


def step_seconds(
    target: Target, drafter: Drafter, batch: int, rule: Verifier, fresh: bool = False
) -> StepSeconds:
    """The stored result of `time_steps`; timed now if there is none, or `fresh` asks for it."""
    path = cache_file(target, drafter, batch, rule)
    if path.exists() and not fresh:
        try:
            return read_seconds(path)
        except (ValueError, TypeError):
            logger.warning("%s cannot be read; steps are timed again", path)
    seconds = time_steps(target, drafter, batch, rule)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps([[_fields(budget), took] for budget, took in seconds.items()]))
    return seconds


def rows_timed(rule: Verifier, batch: int) -> int:
    """The number of rows for which steps are timed: batches of 3 and 4 share one timing.

    The budget of a rule that draws children is chosen as for a single row.
    """
    return 1 if rule.draws_children else 2 ** (batch - 1).bit_length()


def read_seconds(path: Path) -> StepSeconds:
    """Step times written earlier; raises ValueError or TypeError for anything else."""
    return {
        None if fields is None else Budget(*fields): float(seconds)
        for fields, seconds in json.loads(path.read_text())
    }


def _fields(budget: Budget | None) -> list[int] | None:
    return None if budget is None else [budget.nodes, budget.depth]


def cache_file(target: Target, drafter: Drafter, batch: int, rule: Verifier) -> Path:
    """Where the step times of these models under a rule on this machine are stored."""
    about = [
        TIMING_VERSION,
        describe_machine(),
        describe_versions(),
        target.config.to_diff_dict(),
        str(target.dtype),
        type(target).__name__,
        drafter.identity(),
        [_fields(budget) for budget in drafter.budgets],
        batch,
        rule.name,
    ]
    digest = hashlib.sha256(json.dumps(about, default=str, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "step_costs" / f"{digest[:16]}.json"
