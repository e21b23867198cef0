"""`drafthead build`: from a model to the fastest way of decoding it, in the time you give."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from drafthead.core.errors import UserError
from drafthead.core.settings import MaxNewTokens
from drafthead.scripts import options

if TYPE_CHECKING:
    from drafthead.lab.building.folder import Choices


def main(
    *,
    model: options.Model,
    output: Annotated[
        Path, typer.Option(help="Folder of the build; the same command goes on with it.")
    ],
    hours: Annotated[
        float | None, typer.Option(help="Time for all of it; this or --minutes is required.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="The same in minutes.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompts as your users send them: a file, folder or data set. Repeatable. "
            "Without, the model writes users' messages itself."
        ),
    ] = None,
    family: Annotated[
        str,
        typer.Option(
            help=f"Of the head: {options.FAMILIES}. vLLM, SGLang and llama.cpp read "
            "eagle3-portable."
        ),
    ] = "eagle3",
    max_new_tokens: MaxNewTokens = 192,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts.")] = 0,
    compile: Annotated[
        bool | None,
        typer.Option(help="Compile the passes; by default from 10 minutes on: it takes some."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what would be made, and what it needs; then end.")
    ] = False,
) -> None:
    """Make a model faster with the same text: one command from the model to a number.

    Plans, collects prompts and holds a share out, lets the model answer, counts n-grams, trains a
    head, measures it, races all ways of decoding on prompts that nothing has seen, and writes
    report.html and a model card. It ends with what is fastest here, by how much, and what to run.

    Killed at any moment, the same command goes on. More time, or another --family, repeats the
    stages that it touches. build.yaml in the folder holds each choice, and each stage's command.
    """
    if (total := 60 * (hours or 0) + (minutes or 0)) <= 0:
        raise UserError("a build needs time: give --minutes or --hours, above 0")
    # For torch's allocator: on a GPU each stage wants memory in other pieces than the one before.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from drafthead.lab.building.folder import Choices

    choices = Choices(
        model.target, model.dtype, model.device, tuple(prompts or ()), max_new_tokens, seed,
        family, total, (total >= 10 or None) if compile is None else compile,
    )  # fmt: skip
    run(choices, output, plan)


def run(choices: "Choices", output: Path, plan: bool) -> None:
    """Build in a folder, or show what would be made."""
    from drafthead.lab.building.folder import BuildFolder
    from drafthead.scripts.stages import Building
    from drafthead.train.jobs.outputs import full_disk_named, only_writer

    folder = BuildFolder(output)
    if plan:
        with TemporaryDirectory() as scratch:
            folder.begin(choices)
            typer.echo(Building(choices, folder, Path(scratch)).first_plan())
        return
    with only_writer(output / ".lock", output), full_disk_named(output):
        folder.begin(choices)
        building = Building(choices, folder)
        typer.echo(building.first_plan())
        building.run()
        typer.echo(building.ending())
