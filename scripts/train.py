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
            help="Show the memory, the disk and the time that the run will need, and end: computed "
            "part by part, then measured in a few real steps.",
        ),
    ] = False
    devices: Annotated[
        AtLeastOne, Field(description="Of a plan: processes that share the run.")
    ] = 1
    memory: Annotated[
        str | None,
        typer.Option(help="Of a plan: what a device has, as 80GB; default: what is here."),
    ] = None
    tokens: Annotated[
        float | None,
        typer.Option(help="Of a plan: supervised tokens to learn, for how long that takes."),
    ] = None
    measure: Annotated[
        bool,
        typer.Option(help="Of a plan: try real steps, for a minute at most; or compute only."),
    ] = True
    output: Annotated[Path | None, typer.Option(help="Of a plan: JSON file to write.")] = None


def main(
    *,
    config: Annotated[
        Path, typer.Option(help="Configuration file, such as configs/demo_medusa.yaml.")
    ],
    init: Annotated[
        str | None,
        typer.Option(
            metavar="FAMILY",
            help=f"Write FILE for this family, and end: {options.FAMILIES}.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --init: the model to fit FILE to.")
    ] = None,
    plan: Plan,
    settings: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Train draft heads on the hidden states of a frozen target.

    \b
    A first FILE:       drafthead train --init parallel --target MODEL --config FILE
    What it will need:  drafthead train --plan --config FILE
    One process:        drafthead train --config FILE
    With accelerate:    accelerate launch train/train_heads.py --config FILE
    Two CPU processes:  accelerate launch --config_file configs/accelerate/cpu2.yaml
                        train/train_heads.py --config FILE
    Other settings:     ... --config FILE optimizer.lr=3e-4 train.max_minutes=10

    A file has the sections target, head, data, optimizer and train. Settings after it override it.
    The same command continues a stopped run, and does nothing when the run is finished.
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
        options.refuse(given, "only --plan plans a run")
        if init is not None or target is not None:
            from drafthead.train.run.starting_config import write_starting_config

            write_starting_config(init, target, config)
            print(f"{config} is written: look at it, then drafthead train --config {config}")
        else:
            from drafthead.train import train_heads

            train_heads.main(config, settings)
