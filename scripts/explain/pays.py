"""`drafthead explain pays`: whether a head pays on another machine, by its acceptance and costs."""

from pathlib import Path
from typing import Annotated

import typer

from drafthead.scripts import options


def main(
    *,
    trace: Annotated[Path, typer.Option(help="File of `head evaluate --trace`.")],
    cost: Annotated[
        list[Path],
        typer.Option(
            help="What steps take there: of `explain tree --output`, benchmarks/gpu.py, or "
            "written by hand. Several are joined.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Of benchmarks/gpu.py's models, and how it ran: '8B compiled layers'."),
    ] = None,
    output: options.JsonFile = None,
) -> None:
    """Predict what a head gains on a machine that it has never run on.

    The trace says what trees of each size accept, without hardware in it; the costs say what a step
    takes there. Together: the best tree and its speedup over plain decoding, with an interval, and
    from which batch and which context on drafting stops paying. Costs by hand are JSON: {"steps":
    [{"nodes": 1, "ms": 5.1}, {"nodes": 16, "depth": 4, "ms": 7.9, "batch": 1, "columns": 256}]}.
    """
    from drafthead.lab.paying.acceptance_trace import AcceptanceTrace
    from drafthead.lab.paying.costs import CostCurve, read_costs
    from drafthead.lab.paying.forecast import paying_report

    found = AcceptanceTrace.read(trace)
    curve = CostCurve(read_costs(cost, model, found.family))
    options.finish(paying_report(found, curve), output)
