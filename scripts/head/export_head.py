"""`drafthead head export`: writes a head in the files that other software reads."""

from typing import Annotated

import typer

from drafthead.scripts import options


def main(
    head: options.HeadPath,
    format: Annotated[str, typer.Option(help="Name of the format; see docs/formats.md.")],
    output: options.NewFolder,
    target: Annotated[
        str | None,
        typer.Option(help="The head's target, for formats that hold copies of its weights."),
    ] = None,
) -> None:
    """Write a head for another program, if that program computes the same.

    The written files are read back, and the other program's arithmetic is repeated from them in
    plain torch. If its probabilities for a chain of drafted tokens differ from this head's, the
    files are removed. If the format cannot express the head, the error names what it lacks.
    """
    from drafthead.heads.formats import build_head, read_foreign
    from drafthead.heads.formats.base import TargetFacts
    from drafthead.heads.formats.exporting import export_head
    from drafthead.heads.target.target import Target

    loaded = Target.from_pretrained(target, "float32", "cpu") if target else None
    facts = TargetFacts.of(loaded, target) if loaded else TargetFacts()
    _, foreign = read_foreign(head, facts)
    ours = build_head(foreign, head, loaded)
    described = facts.completed(foreign.target)
    difference = export_head(ours, described, loaded, format, output)
    print(f"{output}: {format}, log-probabilities replayed within {difference:.1e}")
