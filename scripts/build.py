"""`drafthead build`: from a model to the fastest way of decoding it, in the time you give."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from drafthead.core.errors import UserError
from drafthead.lab.building.choices import BuildOptions, Choices
from drafthead.scripts import options
from drafthead.train.jobs.outputs import full_disk_named, only_writer


def main(
    *,
    model: options.Model,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Output folder. Run the same command again to continue an interrupted build. With "
            "--continue a new folder, by default beside the old one."
        ),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="Time budget in hours. You must give --hours or --minutes.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Time budget in minutes.")] = None,
    build: BuildOptions,
    before: Annotated[
        Path | None,
        options.OfHead,
        typer.Option(
            "--continue",
            help="A build, or a head: tune it and its table on the answers of --data, and race old "
            "against new.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        options.OfData,
        typer.Option(help="Answers that serve --record has kept, for --continue."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what the build would do and need, and exit.")
    ] = False,
) -> None:
    """Find the fastest way to decode a model, in the time you give.

    It is for this machine. The build collects prompts, generates the model's answers, counts
    n-grams, trains a head, and times every method on prompts that were held out. It ends with the
    fastest method and the command to run it, and writes report.html and a model card.

    Run the same command again to continue an interrupted build. More time or another --family
    repeats only the stages that change. build.yaml in the output folder records every decision and
    the command of each stage.

    --continue FOLDER --data FILE --minutes N tunes an existing build or head on the requests that
    a server gets: `serve --record FILE` keeps them, and POST /v1/drafts loads the better drafts.
    """
    choices = chosen(model, build, 60 * (hours or 0) + (minutes or 0))
    if before is not None and data is not None and not plan:
        from drafthead.scripts.building.tuning import Tuning

        Tuning(choices, before, data, output or before.with_name(f"{before.name}-tuned")).run()
    elif before is not None or data is not None:
        raise UserError("--continue FOLDER and --data FILE go together, and without --plan")
    elif output is None:
        raise UserError("give --output, the folder of the build")
    else:
        run(choices, output, plan)


def chosen(model: options.Model, build: BuildOptions, minutes: float) -> Choices:
    """The choices of a build of so many minutes; raises UserError for none."""
    if minutes <= 0:
        raise UserError("a build needs a time budget: give --minutes or --hours, above 0")
    # For torch's allocator: on a GPU each stage wants memory in other pieces than the one before.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    import torch

    on_gpu = minutes >= 10 and torch.cuda.is_available()
    compiles = True if on_gpu and build.compile is None else build.compile
    return Choices(**{**vars(model), **vars(build), "minutes": minutes, "compile": compiles})


def run(choices: Choices, output: Path, plan: bool) -> None:
    """Build in a folder, or show what would be made."""
    from drafthead.lab.building.folder import BuildFolder
    from drafthead.scripts.building.stages import Building

    folder = BuildFolder(output)
    if plan:
        with TemporaryDirectory() as scratch:
            folder.begin(choices)
            typer.echo(Building(choices, folder, Path(scratch)).first_plan())
        return
    with only_writer(output), full_disk_named(output):
        folder.begin(choices)
        building = Building(choices, folder)
        typer.echo(building.first_plan())
        building.run()
        typer.echo(building.ending())
