"""`drafthead explain pays`: whether a head pays on another machine, by its acceptance and costs."""

from pathlib import Path
from typing import Annotated

import typer

from drafthead.scripts import options


def main(
    *,
    trace: Annotated[Path, typer.Option(help="File from `head evaluate --trace`.")],
    cost: Annotated[
        list[Path],
        typer.Option(
            help="Step times of that machine: a file from `explain tree --output` or "
            "benchmarks/gpu.py, or written by hand. Repeatable.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Which model of a benchmarks/gpu.py file: '8B compiled layers'."),
    ] = None,
    output: options.JsonFile = None,
) -> None:
    """Predict a head's speedup on a machine that you do not have.

    The trace says how many tokens trees of each size get accepted. The costs say how long a step
    takes on that machine. Together they give the best tree, its speedup over plain decoding with an
    interval, and the break-even batch size and context length. You can write costs by hand as JSON:
    {"steps": [{"nodes": 1, "ms": 5.1}, {"nodes": 16, "depth": 4, "ms": 7.9, "batch": 1, "columns":
    256}]}.
    """
    from drafthead.lab.paying.acceptance_trace import AcceptanceTrace
    from drafthead.lab.paying.costs import CostCurve, read_costs
    from drafthead.lab.paying.forecast import paying_report

    found = AcceptanceTrace.read(trace)
    curve = CostCurve(read_costs(cost, model, found.family))
    options.finish(paying_report(found, curve), output)
