"""`drafthead head export`: writes a head in the files that other software reads."""

from pathlib import Path
from typing import Annotated

import typer

from drafthead.core.errors import UserError
from drafthead.scripts import options


def main(
    head: Annotated[
        Path,
        options.OfDraft,
        typer.Argument(
            help="The head: a folder or file in any known format, or OWNER/NAME on the hub. With "
            "--for also a draft model, an n-gram table, or lookup.",
            metavar="HEAD",
        ),
    ],
    output: options.NewFolder,
    server: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Export for vllm, sglang or llamacpp, with a script serve.sh that starts the "
            "server with the right method and number of draft tokens.",
            metavar="SERVER",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help=f"Exactly this format instead: {options.FORMATS}; see docs/formats.md."),
    ] = None,
    target: options.HeadTarget = None,
) -> None:
    """Export a head for another project, with a numeric check.

    The written files are read back, and the other project's arithmetic is repeated in plain torch.
    If its probabilities for a chain of draft tokens differ from this head's, the files are removed.
    If no format can express the head, the error says what each lacks.
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
    print(f"{output}/{SCRIPT}: {served.layout}, method {served.method}")
    print(f"K = {served.tokens} draft tokens: {served.reason}")
    print(f"start the server: PORT=8000 sh {output}/{SCRIPT}")
    audited = f"http://127.0.0.1:8000 --target {served.target} --head {served.head}"
    print(f"then test it: drafthead audit {audited}")
