"""Tables of whether drafting pays on a machine: by batch, by context, by kind of request."""

from collections.abc import Sequence
from dataclasses import asdict

from drafthead.lab.paying.acceptance_trace import AcceptanceTrace
from drafthead.lab.paying.costs import CostCurve
from drafthead.lab.paying.forecast import Forecast, Forecasts
from drafthead.lab.reports.report import Columns, Report, number, table_of

COLUMNS: Columns = {
    "answers": lambda f: str(f.answers),
    "best tree": lambda f: f"{f.nodes} nodes, K = {f.depth}",
    "tokens a step": lambda f: number(f.tokens.value),
    "plain ms": lambda f: number(f.plain_ms),
    "step ms": lambda f: number(f.step_ms),
    "over plain": lambda f: interval(f),
}


def interval(forecast: Forecast) -> str:
    """The speedup, and what 95 % of resampled answers have."""
    found = forecast.speedup
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def paying_report(trace: AcceptanceTrace, curve: CostCurve) -> Report:
    """Everything that the two tell together."""
    found = Forecasts(trace, curve)
    batches, contexts = list(found.by_batch()), list(found.by_context())
    alone = batches[0]
    kinds = list(found.by_kind((alone.nodes, alone.depth)))
    named = {"batch": batches, "context": contexts, "kind": kinds}
    tables = [
        table_of(f"{trace.head}: by {name}", {name: lambda f: f.where} | dict(COLUMNS), rows)
        for name, rows in named.items()
        if rows
    ]
    notes = [
        f"one row after {found.usual} tokens: {interval(alone)} times plain decoding, with trees "
        f"of {alone.nodes} nodes and K = {alone.depth}",
        until("batch", batches),
        until("context", contexts),
        "trees are static ones: heads that grow theirs by confidence accept somewhat more; the "
        "intervals are those of the acceptance alone",
    ]
    content = {
        name: [asdict(f) | {"speedup": asdict(f.speedup)} for f in rows]
        for name, rows in named.items()
    }
    return Report(tables, notes, {"target": trace.target, "head": trace.head, **content})


def until(name: str, rows: Sequence[Forecast]) -> str:
    """From where on drafting stops paying, if it does."""
    pays = [forecast.speedup.value > 1 for forecast in rows]
    if all(pays):
        return f"it pays at every {name} that the costs cover, up to {rows[-1].where}"
    ends = len(pays) - pays[::-1].index(True) if any(pays) else 0
    return f"it pays at no {name} from {rows[min(ends, len(rows) - 1)].where} on"
