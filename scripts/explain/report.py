"""`drafthead explain report`: a training run, and what was measured of its head, as one page."""

from pathlib import Path
from typing import Annotated

import typer

from drafthead.scripts import options


def main(
    run: Annotated[Path, typer.Argument(help="Folder of a training run (its train.output).")],
    comparison: Annotated[
        list[Path] | None, typer.Option(help="Output folder of `compare`. Repeatable.")
    ] = None,
    doctor: Annotated[Path | None, typer.Option(help="File from `head doctor --output`.")] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Page from `explain trace`. Repeatable.")
    ] = None,
    output: options.PageFile = Path("report.html"),
) -> None:
    """Collect a training run and its measurements in one HTML page.

    The page shows training curves, accuracy on held-out answers, comparisons with pictures, the
    doctor's findings, traces and settings. It is one file and works offline.
    """
    from drafthead.lab.reports.run_page import report_of

    options.write_page(output, report_of(run, comparison or (), doctor, trace or ()))
