"""`drafthead head export`: writes a head in the files that other software reads."""

from pathlib import Path
from typing import Annotated

import typer

from drafthead.core.errors import UserError
from drafthead.scripts import options


def main(
    head: Annotated[
        Path,
        typer.Argument(
            help="Trained head: a folder or a file of any known format, or OWNER/NAME on the hub. "
            "With --for also a draft model, a table of n-grams, or lookup.",
            metavar="HEAD",
        ),
    ],
    output: options.NewFolder,
    server: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="vllm, sglang or llamacpp: the layout that it reads, and a serve.sh that starts "
            "it with the right method and number of drafted tokens.",
            metavar="SERVER",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help=f"Exactly this layout instead: {options.FORMATS}; see docs/formats.md."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The target, for formats that hold copies of its weights, and for what is no head."
        ),
    ] = None,
) -> None:
    """Write a head for another program, if that program computes the same.

    The written files are read back, and the other program's arithmetic is repeated from them in
    plain torch. If its probabilities for a chain of drafted tokens differ from this head's, the
    files are removed. If no format can express the head, the error names what each lacks.
    """
    from drafthead.heads.formats.exporting import export_head
    from drafthead.lab.servers.export_for import SCRIPT, export_named, read_head

    if (format is None) == (server is None):
        raise UserError("name either a server with --for, or a layout with --format")
    if format is not None:
        difference = export_head(*read_head(head, target), format, output)
        print(f"{output}: {format}, log-probabilities replayed within {difference:.1e}")
        return
    assert server is not None
    served = export_named(server, str(head), target, output)
    print(f"{output}/{SCRIPT}: {served.layout}, method {served.method}, K = {served.tokens}")
    print(f"K: {served.reason}")
    print(f"PORT=8000 sh {output}/{SCRIPT} starts it. Does it write the target's text then?")
    print(f"drafthead audit http://127.0.0.1:8000 --target {served.target} --head {served.head}")
