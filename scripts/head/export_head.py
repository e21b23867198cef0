"""`drafthead head export`: writes a head in the files that other software reads."""

from typing import Annotated

import typer

from drafthead.heads.errors import UserError
from drafthead.scripts import options


def main(
    head: options.HeadPath,
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
    launch: Annotated[
        bool, typer.Option("--launch", help="With --for: start it, until Ctrl-C.")
    ] = False,
    format: Annotated[
        str | None, typer.Option(help="Exactly this layout instead; see docs/formats.md.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="The head's target, for formats that hold copies of its weights."),
    ] = None,
) -> None:
    """Write a head for another program, if that program computes the same.

    The written files are read back, and the other program's arithmetic is repeated from them in
    plain torch. If its probabilities for a chain of drafted tokens differ from this head's, the
    files are removed. If no format can express the head, the error names what each lacks.
    """
    from drafthead.heads.formats import build_head, read_foreign
    from drafthead.heads.formats.base import TargetFacts
    from drafthead.heads.formats.exporting import export_head
    from drafthead.heads.target.any_target import load_decoder_only
    from drafthead.lab.servers import launch as launching
    from drafthead.lab.servers.export_for import SCRIPT, export_for

    if (format is None) == (server is None):
        raise UserError("name a server with --for, or a layout with --format")
    if launch and server is None:
        raise UserError("--launch starts the server that --for names")
    loaded = load_decoder_only(target, "float32", "cpu") if target else None
    facts = TargetFacts.of(loaded, target) if loaded else TargetFacts()
    _, foreign = read_foreign(head, facts)
    ours = build_head(foreign, head, loaded)
    described = facts.completed(foreign.target)
    if format is not None:
        difference = export_head(ours, described, loaded, format, output)
        print(f"{output}: {format}, log-probabilities replayed within {difference:.1e}")
        return
    assert server is not None
    served = export_for(server, ours, head, described, loaded, output)
    print(f"{output}/{SCRIPT}: {served.layout}, method {served.method}, K = {served.tokens}")
    print(f"K: {served.reason}")
    if launch:
        launching.launch(output, served)
