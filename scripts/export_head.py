"""`drafthead export`: one of our heads in the files that other software reads."""

from pathlib import Path
from typing import Annotated

import typer

from drafthead.heads.formats import build_head, read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.exporting import export_head
from drafthead.heads.target.target import Target
from drafthead.scripts import options


def main(
    head: Annotated[
        Path, typer.Argument(help="Folder of a trained head, or any known checkpoint.")
    ],
    format: Annotated[str, typer.Option(help="Name of the format; see docs/formats.md.")],
    output: options.NewFolder,
    target: Annotated[
        str | None,
        typer.Option(help="The head's target, for formats that hold copies of its weights."),
    ] = None,
) -> None:
    """Write a head for another program, once that program is seen to compute the same.

    What was written is read back, and the reader's arithmetic is replayed from the files in plain
    torch: where its probabilities for a chain of drafted tokens differ from this head's, nothing is
    kept. What the format cannot express is an error that names it.
    """
    loaded = Target.from_pretrained(target, "float32", "cpu") if target else None
    facts = TargetFacts.of(loaded, target) if loaded else TargetFacts()
    _, foreign = read_foreign(head, facts)
    ours = build_head(foreign, head, loaded)
    described = facts.completed(foreign.target)
    difference = export_head(ours, described, loaded, format, output)
    print(f"{output}: {format}, log-probabilities replayed within {difference:.1e}")
