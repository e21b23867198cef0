"""`drafthead train`: trains a head in this process; first configurations, and plans of runs."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from drafthead.core.settings import AtLeastOne, settings
from drafthead.scripts import options


@settings(kw_only=True)
class Plan:
    """What a run is planned for."""

    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Print the memory, disk and time that the run will need, and exit. A few real "
            "steps are tried.",
        ),
    ] = False
    devices: Annotated[
        AtLeastOne, Field(description="With --plan: number of processes that share the run.")
    ] = 1
    memory: Annotated[
        str | None,
        typer.Option(
            help="With --plan: memory of a device, such as 80GB. Default: this machine's."
        ),
    ] = None
    tokens: Annotated[
        float | None,
        typer.Option(
            help="With --plan: number of supervised tokens to train on, to predict the time."
        ),
    ] = None
    measure: Annotated[
        bool,
        typer.Option(help="With --plan: try real steps, for at most a minute."),
    ] = True
    output: Annotated[
        Path | None, typer.Option(help="With --plan: also write the plan to this JSON file.")
    ] = None


def main(
    *,
    config: Annotated[
        Path, typer.Option(help="Configuration file, such as configs/demo_medusa.yaml.")
    ],
    init: Annotated[
        str | None,
        typer.Option(
            metavar="FAMILY",
            help=f"Write a configuration file for this family, and exit: {options.FAMILIES}.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --init: the model to train for.")
    ] = None,
    plan: Plan,
    settings: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Train draft heads on the hidden states of a frozen target.

    \b
    Write FILE:        drafthead train --init eagle3 --target MODEL --config FILE
    Check memory:      drafthead train --plan --config FILE
    Train:             drafthead train --config FILE
    Several processes: accelerate launch -m drafthead.train.train_heads --config FILE
    Change settings:   drafthead train --config FILE optimizer.lr=3e-4 train.max_minutes=10

    FILE has the sections target, head, data, optimizer and train. Run the same command again to
    continue an interrupted run.
    """
    if plan.plan:
        from drafthead.lab.planned_training import plan_training
        from drafthead.lab.reports.training_plan import plan_report

        options.refuse({"--init": init, "--target": target}, "a plan is of a file")
        found = plan_training(
            config, settings or [], plan.devices, plan.memory, plan.tokens, plan.measure
        )
        options.finish(plan_report(found), plan.output)
    else:
        given = {
            "--devices": plan.devices > 1,
            "--output": plan.output, "--memory": plan.memory, "--tokens": plan.tokens,
            "--no-measure": not plan.measure,
        }  # fmt: skip
        options.refuse(given, "this option needs --plan")
        if init is not None or target is not None:
            from drafthead.train.run.starting_config import write_starting_config

            write_starting_config(init, target, config)
            print(f"{config} is written: look at it, then drafthead train --config {config}")
        else:
            from drafthead.train import train_heads

            train_heads.main(config, settings)
