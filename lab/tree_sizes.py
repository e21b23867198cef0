"""The planner's sizes with the times of this machine, which is chosen, and why."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.trees.tree import UNMEASURED_ALPHA, Budget
from drafthead.infer import Decoder
from drafthead.infer.planning.planner import AdaptivePlan
from drafthead.infer.timing.plans import StepKind, rows_that_share
from drafthead.infer.timing.step_timing import ENOUGH_SECONDS, PROMPT_TOKENS
from drafthead.infer.verifiers import verifier_for
from drafthead.lab.reports.report import Columns, Report, table_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanRow:
    """One size of tree as the planner sees it before decoding; one node is plain decoding."""

    nodes: int
    depth: int
    step_seconds: float
    tokens: float  # that a step is expected to commit per row
    tokens_per_second: float  # of a row
    speedup: float  # over plain decoding
    chosen: bool


def plan_rows(plan: AdaptivePlan) -> list[PlanRow]:
    """Plain decoding and every budget of a plan, from small to large; one of them is chosen."""
    chosen = plan.best()
    return [
        PlanRow(
            nodes=budget.nodes if budget else 1,
            depth=budget.depth if budget else 0,
            step_seconds=plan.seconds(budget),
            tokens=plan.tokens(budget),
            tokens_per_second=plan.rate(budget),
            speedup=plan.rate(budget) / plan.rate(None),
            chosen=budget == chosen,
        )
        for budget in plan.sizes
    ]


def reason(rows: Sequence[PlanRow]) -> str:
    """Say why the planner chose as it did: against plain decoding, and against the next size."""
    plain, *trees = rows
    place = next(i for i, row in enumerate(rows) if row.chosen)
    if place == 0:
        best = max(trees, key=lambda row: row.tokens_per_second)
        return (
            f"plain decoding: no tree beats its 1 token in {ms(plain)} ms clearly; the best, "
            f"{sized(best)}, would bring {best.tokens:.2f} in {ms(best)} ms, "
            f"{best.speedup:.2f}x"
        )
    chosen = rows[place]
    other = rows[place + 1] if place + 1 < len(rows) else rows[place - 1]
    verdict = (
        f"{sized(chosen)}: {chosen.tokens:.2f} tokens in {ms(chosen)} ms beat plain "
        f"decoding's 1 in {ms(plain)} ms by {chosen.speedup:.2f}x"
    )
    if other is plain:
        return verdict
    return (
        f"{verdict}; {sized(other)} would bring {other.tokens:.2f} in {ms(other)} ms, "
        f"{other.speedup:.2f}x"
    )


def sized(row: PlanRow) -> str:
    """The size of a tree in words; two of the same number of nodes differ in depth."""
    if row.nodes == row.depth + 1:
        return f"a chain of {row.depth} tokens"
    return f"a tree of {row.nodes} nodes and depth {row.depth}"


def ms(row: PlanRow) -> str:
    """A step's milliseconds with three significant digits, as a tiny model's are below 1."""
    return f"{1000 * row.step_seconds:.3g}"


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
    """Return how the steps were timed, and whether now or before."""
    rows = f"{timed} row{'s' if timed > 1 else ''}"
    if timed != batch:
        rows += f" (the planner's choice for a batch of {batch})"
    when = "timed by an earlier run, --fresh times again" if is_stored else "timed now"
    tokens, enough = PROMPT_TOKENS, ENOUGH_SECONDS
    return (
        f"steps of {rows} after {tokens} prompt tokens, {when}: {file}; where that takes more than "
        f"{enough:g} s, the times of large trees that cannot win follow from those of smaller ones"
    )


PLAN_COLUMNS: Columns = {
    "nodes": lambda row: str(row.nodes),
    "depth": lambda row: str(row.depth),
    "step ms": lambda row: f"{1000 * row.step_seconds:.2f}",
    "tokens per step": lambda row: f"{row.tokens:.2f}",
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "speedup": lambda row: f"{row.speedup:.2f}",
    "choice": lambda row: "" if not row.chosen else "<--" if row.depth else "none: plain decoding",
}


def plan_report(rows: Sequence[PlanRow], notes: Sequence[str], about: dict[str, Any]) -> Report:
    """The plan of a head; the first note is the reason of the choice."""
    chosen = next(row for row in rows if row.chosen)
    choice = {"nodes": chosen.nodes, "depth": chosen.depth} if chosen.depth else None
    sizes = [asdict(row) for row in rows]
    return Report(
        [table_of(f"{about['head']} on {about['target']}", PLAN_COLUMNS, rows)],
        notes,
        {**about, "choice": choice, "reason": notes[0], "sizes": sizes},
    )
