"""The planner's choice with the numbers it is based on, and the reason in one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass

from drafthead.infer.engine.planner import AdaptivePlan


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
    """Why the planner chose as it did: against plain decoding, and against the next size."""
    plain, *trees = rows
    place = next(i for i, row in enumerate(rows) if row.chosen)
    if place == 0:
        best = max(trees, key=lambda row: row.tokens_per_second)
        return (
            f"plain decoding: no tree beats its 1 token in {ms(plain)} ms clearly; the best, "
            f"{best.nodes} nodes, would bring {best.tokens:.2f} in {ms(best)} ms, "
            f"{best.speedup:.2f}x"
        )
    chosen = rows[place]
    other = rows[place + 1] if place + 1 < len(rows) else rows[place - 1]
    verdict = (
        f"{chosen.nodes} nodes: {chosen.tokens:.2f} tokens in {ms(chosen)} ms beat plain "
        f"decoding's 1 in {ms(plain)} ms by {chosen.speedup:.2f}x"
    )
    if other is plain:
        return verdict
    return (
        f"{verdict}; {other.nodes} nodes would bring {other.tokens:.2f} in {ms(other)} ms, "
        f"{other.speedup:.2f}x"
    )


def ms(row: PlanRow) -> str:
    """A step's milliseconds with three significant digits, as a tiny model's are below 1."""
    return f"{1000 * row.step_seconds:.3g}"
