"""`drafthead plan-tree`: the cost and the gain of each tree size here, and which is chosen."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.trees.tree import UNMEASURED_ALPHA, Budget
from drafthead.infer import Decoder
from drafthead.infer.timing.plans import StepKind, rows_that_share
from drafthead.infer.timing.step_timing import TIMING_SETTINGS
from drafthead.infer.verifiers import verifier_for
from drafthead.lab.profiling.plan_table import PlanRow, plan_rows, reason
from drafthead.lab.races.record import describe_run
from drafthead.lab.reports.plan import plan_report
from drafthead.scripts import options

logger = logging.getLogger(__name__)


def main(
    target: options.TargetName,
    head: options.NeededHeadName,
    batch: options.BatchSize = 1,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; above 0 the size is chosen as for a single row.")
    ] = 0.0,
    compile: Annotated[
        bool, typer.Option(help="Plan for compiled passes: minutes the first time.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option(help="Time the steps again and store the new times.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="JSON file to write; a picture is written next to it.")
    ] = None,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
) -> None:
    """Show the numbers from which decoding chooses the size of its token trees.

    A larger tree brings more tokens per step and makes the step longer. For every size: the time of
    a step on this machine, timed once and stored (--fresh times again), the tokens per step
    expected from the head's acceptance on held-out answers, and their quotient, tokens per second
    of one row. The smallest size within 3 % of the best is chosen; plain decoding (1 node) is one
    of the sizes. Decoding needs no such table: it learns these times itself, and its choice follows
    them and the acceptance that it meets. --tree-nodes of the other verbs overrides it.
    """
    draft = options.draft_names(head)
    decoder = Decoder.from_pretrained(target, draft, dtype=dtype, device=device, compile=compile)
    plan = measured_plan(decoder, batch, temperature, fresh)
    if temperature > 0:
        plan.notes.append(
            "expected tokens are those of greedy decoding; above temperature 0 fewer are accepted, "
            "and the choice follows the measured acceptance"
        )
    about = {
        **describe_run(target, decoder.target), "head": str(head), "batch": batch,
        "rows_timed": plan.rows_timed, "temperature": temperature, "compiled": compile,
    }  # fmt: skip
    report = plan_report(plan.rows, plan.notes, about)
    report.show()
    if output is not None:
        report.write(output)


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
