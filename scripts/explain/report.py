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
    from drafthead.heads.formats.files import read_json
    from drafthead.lab.reports.run_page import (
        comparison_section,
        doctor_section,
        facts_of,
        held_out_section,
        run_page,
        settings_section,
        trace_section,
        training_section,
    )
    from drafthead.train.run.folder import summarize

    record = read_json(run / "run.json")
    summary = summarize(run)
    sections = [
        training_section(run),
        *([held_out_section(summary.evaluation)] if summary.evaluation else []),
        *map(comparison_section, comparison or []),
        *([doctor_section(doctor)] if doctor is not None else []),
        *map(trace_section, trace or []),
        settings_section(record),
    ]
    settings = record["settings"]
    # The target's name alone: the page is made to be sent, and the path is in the settings.
    title = f"{settings['head']['family']} for {Path(settings['target']['name']).name}"
    options.write_page(output, run_page(title, facts_of(record, summary), sections))
