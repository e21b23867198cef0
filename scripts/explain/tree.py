"""`drafthead explain tree`: the cost and the gain of each tree size here, and which is chosen."""

from typing import Annotated

import typer

from drafthead.core.settings import BatchSize, CompileSwitch, Temperature
from drafthead.scripts import options


def main(
    *,
    model: options.Model,
    draft: Annotated[
        str,
        options.OfHead,
        typer.Option(help="The head: a folder, a hub id, or smollm2-eagle3.", metavar="HEAD"),
    ],
    batch: BatchSize = 1,
    temperature: Temperature = 0.0,
    compile: CompileSwitch = None,
    fresh: Annotated[bool, typer.Option(help="Measure the step times again.")] = False,
    output: options.JsonFile = None,
) -> None:
    """Show what each size of draft tree costs and gains on this machine.

    A larger tree gets more tokens accepted per step but makes the step longer. For every size, the
    table shows the time of a step (measured once and stored), the tokens per step expected from the
    head's measured acceptance, and the resulting tokens per second of one sequence. The smallest
    size within 3 % of the best is marked; 1 node is plain decoding. Decoding does not need this
    table: it measures times and acceptance itself. Use --tree-nodes of other commands to fix a
    size.
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
        "rows_timed": plan.rows_timed, "temperature": temperature,
        "compiled": decoder.target.backend.fuses,
    }  # fmt: skip
    options.finish(plan_report(plan.rows, plan.notes, about), output)
