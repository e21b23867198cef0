"""Step times of this machine, stored for the next time that the same models run on it."""

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from drafthead.heads.disk_cache import cache_folder, read_cached, write_cached
from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Budget
from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.infer.timing.step_timing import StepSeconds, time_steps
from drafthead.infer.verifiers import Verifier

logger = logging.getLogger(__name__)

# Goes up when steps change or are timed in another way: times of an older version are not read.
TIMING_VERSION = 4


def step_seconds(target: Target, drafter: Drafter, batch: int, rule: Verifier) -> StepSeconds:
    """The stored result of `time_steps`, or that of timing now."""
    stored = stored_seconds(cache_file(target, drafter, batch, rule), drafter.budgets)
    return stored or time_and_store(target, drafter, batch, rule)


def time_and_store(target: Target, drafter: Drafter, batch: int, rule: Verifier) -> StepSeconds:
    """The result of `time_steps`, which is kept for later runs where that is possible."""
    seconds = time_steps(target, drafter, batch, rule)
    text = json.dumps([[_fields(budget), took] for budget, took in seconds.items()])
    write_cached(cache_file(target, drafter, batch, rule), text)
    return seconds


def rows_timed(rule: Verifier, batch: int) -> int:
    """The number of rows for which steps are timed: batches of 3 and 4 share one timing.

    The budget of a rule that draws children is chosen as for a single row.
    """
    return 1 if rule.draws_children else 2 ** (batch - 1).bit_length()


def stored_seconds(path: Path, budgets: Sequence[Budget]) -> StepSeconds | None:
    """Step times of these budgets and of plain steps written earlier; None if there are none."""
    try:
        text = read_cached(path)
        if text is None:
            return None
        seconds = {
            None if fields is None else Budget(*fields): float(took)
            for fields, took in json.loads(text)
        }
        if seconds.keys() == {None, *budgets} and all(0 < s < math.inf for s in seconds.values()):
            return seconds
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        pass
    logger.warning("%s is damaged; steps are timed again", path)
    return None


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
    return cache_folder("step_costs") / f"{digest[:16]}.json"
