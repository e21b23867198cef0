"""What steps cost on this machine, kept for the next time that the same models run on it."""

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

# Goes up when steps change or are timed in another way: what was kept before is then left alone.
TIMING = 4


def step_seconds(
    target: Target, drafter: Drafter, batch: int, rule: Verifier, fresh: bool = False
) -> StepSeconds:
    """`time_steps`, from the last time if the same was timed before and is not wanted `fresh`."""
    kept = cost_file(target, drafter, batch, rule)
    if kept.exists() and not fresh:
        try:
            return read_costs(kept)
        except (ValueError, TypeError):
            logger.warning("%s cannot be read; steps are timed anew", kept)
    costs = time_steps(target, drafter, batch, rule)
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_text(kept, json.dumps([[_fields(stop), seconds] for stop, seconds in costs.items()]))
    return costs


def rows_timed(rule: Verifier, batch: int) -> int:
    """For how many rows steps are timed: batches of 3 and 4 share one timing.

    The budget of a rule that draws children is chosen as for a single row.
    """
    return 1 if rule.draws_children else 2 ** (batch - 1).bit_length()


def read_costs(path: Path) -> StepSeconds:
    """Costs that were written before; raises ValueError or TypeError for anything else."""
    return {
        None if stop is None else Budget(*stop): float(seconds)
        for stop, seconds in json.loads(path.read_text())
    }


def _fields(stop: Budget | None) -> list[int] | None:
    return None if stop is None else [stop.nodes, stop.depth]


def cost_file(target: Target, drafter: Drafter, batch: int, rule: Verifier) -> Path:
    """Where the costs of these models under a rule on this machine are kept."""
    about = [
        TIMING,
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
