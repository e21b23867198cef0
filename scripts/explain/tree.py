"""`drafthead explain tree`: the cost and the gain of each tree size here, and which is chosen."""

from pathlib import Path
from typing import Annotated

import typer

from drafthead.core.settings import BatchSize, CompileSwitch
from drafthead.scripts import options


def main(
    *,
    model: options.Model,
    draft: Annotated[str, typer.Option(help="The head: a folder or hub id.", metavar="HEAD")],
    batch: BatchSize = 1,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; above 0 the size is chosen as for a single row.")
    ] = 0.0,
    compile: CompileSwitch = None,
    fresh: Annotated[
        bool, typer.Option(help="Time the steps again and store the new times.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="JSON file to write; a picture is written next to it.")
    ] = None,
) -> None:
    """Show the numbers from which decoding chooses the size of its token trees.

    A larger tree brings more tokens per step and makes the step longer. For every size: the time of
    a step on this machine, timed once and stored (--fresh times again), the tokens per step
    expected from the head's acceptance on held-out answers, and their quotient, tokens per second
    of one row. The smallest size within 3 % of the best is chosen; plain decoding (1 node) is one
    of the sizes. Decoding needs no such table: it learns these times itself, and its choice follows
    them and the acceptance that it meets. --tree-nodes of the other verbs overrides it.
    """
    from drafthead.lab.races.record import describe_run
    from drafthead.lab.tree_sizes import measured_plan, plan_report

    decoder = options.Drafting(draft=[draft]).decoder(model, compile)
    plan = measured_plan(decoder, batch, temperature, fresh)
    if temperature > 0:
        plan.notes.append(
            "expected tokens are those of greedy decoding; above temperature 0 fewer are accepted, "
            "and the choice follows the measured acceptance"
        )
    about = {
        **describe_run(model.target, decoder.target), "head": draft, "batch": batch,
        "rows_timed": plan.rows_timed, "temperature": temperature, "compiled": bool(compile),
    }  # fmt: skip
    options.finish(plan_report(plan.rows, plan.notes, about), output)
