"""The planner's sizes with the times of this machine, timed now if they never were."""

import logging
from dataclasses import dataclass
from pathlib import Path

from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.trees.tree import UNMEASURED_ALPHA, Budget
from drafthead.infer import Decoder
from drafthead.infer.timing.plans import StepKind, rows_that_share
from drafthead.infer.timing.step_timing import TIMING_SETTINGS
from drafthead.infer.verifiers import verifier_for
from drafthead.lab.profiling.plan_table import PlanRow, plan_rows, reason

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredPlan:
    """The planner's sizes, one of them chosen, and notes; the first note is the reason."""

    rows: list[PlanRow]
    notes: list[str]
    rows_timed: int  # of the batch whose steps were timed


def measured_plan(decoder: Decoder, batch: int, temperature: float, fresh: bool) -> MeasuredPlan:
    """The plan for `batch` rows; times the steps if `fresh` or if that was never done."""
    drafter, plans = decoder.drafter, decoder.plans
    assert drafter is not None and plans is not None
    rule = verifier_for("auto", temperature)
    kind = StepKind(rule.name, rows_that_share(batch), filters=False, processors=False)
    is_stored = plans.costs(kind).was_timed and not fresh
    if not is_stored:
        logger.info("timing the steps of %d tree sizes", len(drafter.budgets))
        decoder.warm_up((kind.rows,), fresh, temperature=temperature)
    rows = plan_rows(plans.plan(kind, temperature))
    notes = [reason(rows), timing_note(kind.rows, batch, is_stored, plans.file)]
    if never_measured(drafter):
        notes.append(
            "the head's acceptance was never measured: each depth is assumed to be accepted "
            f"{UNMEASURED_ALPHA:g} times as often as the one before"
        )
    return MeasuredPlan(rows, notes, kind.rows)


def never_measured(drafter: Drafter) -> bool:
    """Whether a drafter's chances are assumed, those of a tree of its authors or of any other."""
    head = getattr(drafter, "head", None)
    if head is not None and head.usual_paths and not head.path_counts:
        return True
    return all(size.chances == Budget(size.nodes, size.depth).chances for size in drafter.budgets)


def timing_note(timed: int, batch: int, is_stored: bool, file: Path) -> str:
    """How the steps were timed, and whether now or before."""
    rows = f"{timed} row{'s' if timed > 1 else ''}"
    if timed != batch:
        rows += f" (the planner's choice for a batch of {batch})"
    when = "timed by an earlier run, --fresh times again" if is_stored else "timed now"
    tokens, enough = TIMING_SETTINGS.prompt_tokens, TIMING_SETTINGS.enough_seconds
    return (
        f"steps of {rows} after {tokens} prompt tokens, {when}: {file}; where that takes more than "
        f"{enough:g} s, the times of large trees that cannot win follow from those of smaller ones"
    )
