"""`drafthead train`: trains a head in this process, writes first configurations, tries runs."""

from pathlib import Path
from typing import Annotated

import typer

from drafthead.core.errors import UserError
from drafthead.lab.building.choices import FAMILIES
from drafthead.scripts import options


def main(
    *,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file, such as configs/demo_medusa.yaml.")
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="FAMILY",
            help=f"Write a configuration file for this family, and exit: {FAMILIES}.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        options.OfModel,
        typer.Option(metavar="MODEL", help="With --init: the model to train for."),
    ] = None,
    list_settings: Annotated[
        str | None,
        typer.Option(
            "--settings",
            metavar="FAMILY",
            help="List all settings for this family with defaults and bounds, and exit.",
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Try a few real steps, for up to 45 seconds, print their speed and memory and how "
            "long the run will take, and exit.",
        ),
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", hidden=True)
    ] = None,
) -> None:
    """Train draft heads on the hidden states of a frozen target.

    \b
    Write FILE:        drafthead train --init eagle3 --target MODEL --config FILE
    List settings:     drafthead train --settings eagle3
    Try a few steps:   drafthead train --plan --config FILE
    Train:             drafthead train --config FILE
    Several processes: accelerate launch -m drafthead.train.train_heads --config FILE
    Change settings:   drafthead train --config FILE optimizer.lr=3e-4 train.max_minutes=10

    FILE has the sections target, head, data, optimizer and train. Run the same command again to
    continue an interrupted run.
    """
    if list_settings is not None:
        print_settings(list_settings)
        return
    if config is None:
        raise UserError("give --config, the configuration file of the run")
    if init is not None or target is not None:
        options.refuse({"--plan": plan}, "a plan is of a file that is there")
        write_first(init, target, config)
    else:
        run(config, settings or [], plan)


def print_settings(family: str) -> None:
    """Print all settings for a family of heads."""
    from drafthead.train.run.listing import listed

    for each in listed(family):
        print(f"{each.name}: {each.default}\n    {each.values}; {each.help}".rstrip("; "))


def write_first(family: str | None, target: str | None, config: Path) -> None:
    """Write the first configuration of a run."""
    from drafthead.train.run.starting_config import write_starting_config

    write_starting_config(family, target, config)
    print(f"{config} is written: look at it, then drafthead train --config {config}")


def run(config: Path, settings: list[str], plan: bool) -> None:
    """Train, or try a few steps for a `plan`."""
    from drafthead.train.run.config import load_run_config

    loaded = load_run_config(config, settings, present=True)  # before much is imported
    if plan:
        from drafthead.lab.trial import run_trial

        print(*run_trial(config, settings).sentences(loaded), sep="\n")
    else:
        from drafthead.train import train_heads

        train_heads.run(loaded)
