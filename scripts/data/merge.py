"""`drafthead data merge`: joins the shards of `distill --shard` into one file."""

from pathlib import Path
from typing import Annotated

import typer


def main(
    output: Annotated[
        Path,
        typer.Argument(help="File to write: --output of data distill. Its shards lie beside it."),
    ],
) -> None:
    """Join the shards that `distill --shard` has written: the rows of one process, in its order.

    The shards stay as they are, and can be removed afterwards.
    """
    from drafthead.lab.reports.answers import print_answers
    from drafthead.train.distillation.merging import merge
    from drafthead.train.jobs.outputs import full_disk_named

    with full_disk_named(output):
        report = merge(output)
    notes = [f"{report.shards} shards joined; they can be removed"]
    if report.too_long:
        notes.append(f"{report.too_long:,} prompts longer than the context were skipped")
    print_answers(report.statistics, str(output), report.dropped, notes)
