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


@options.settings(kw_only=True)
class Built:
    """Options of what a build makes, and from what."""

    prompts: Annotated[
        list[str] | None,
        options.OfData,
        typer.Option(
            help="Prompts like those of your users: a file, folder or data set. Repeatable. "
            "Without it, the model invents prompts."
        ),
    ] = None
    family: Annotated[
        str,
        typer.Option(
            help=f"Kind of head: {options.FAMILIES}. vLLM, SGLang and llama.cpp can all read "
            "eagle3-portable."
        ),
    ] = "eagle3"
    init_from: Annotated[
        str | None,
        options.OfHead,
        typer.Option(
            help="Start from this head of the same --family, such as that of the model that yours "
            "is fine-tuned from: a folder, OWNER/NAME on the hub, or smollm2-eagle3."
        ),
    ] = None
    max_new_tokens: MaxNewTokens = 192
    seed: Annotated[
        int, typer.Option(help="Random seed for invented prompts and for the held-out split.")
    ] = 0
    compile: Annotated[
        bool | None,
        typer.Option(
            help="For GPUs: compile layers, which takes minutes. By default on from a budget of "
            "10 minutes where there is a GPU."
        ),
    ] = None

    before: Annotated[
        Path | None,
        options.OfHead,
        typer.Option(
            "--continue",
            help="A build, or a head: tune it and its table on the answers of --data, and race old "
            "against new.",
        ),
    ] = None
    data: Annotated[
        Path | None,
        options.OfData,
        typer.Option(help="Answers that serve --record has kept, for --continue."),
    ] = None

    def choices(self, model: options.Model, minutes: float) -> "Choices":
        """The choices that a build's folder records."""
        import torch

        from drafthead.lab.building.folder import Choices

        compiles = self.compile
        if compiles is None and minutes >= 10 and torch.cuda.is_available():
            compiles = True
        return Choices(
            model.target, model.dtype, model.device, tuple(self.prompts or ()),
            self.max_new_tokens, self.seed, self.family, minutes, compiles, self.init_from,
        )  # fmt: skip


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
    built: Built,
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
    if (total := 60 * (hours or 0) + (minutes or 0)) <= 0:
        raise UserError("a build needs a time budget: give --minutes or --hours, above 0")
    # For torch's allocator: on a GPU each stage wants memory in other pieces than the one before.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    choices = built.choices(model, total)
    if built.before is not None and built.data is not None:
        from drafthead.scripts.building.tuning import Tuning

        new = output or built.before.with_name(f"{built.before.name}-tuned")
        Tuning(choices, built.before, built.data, new).run()
    elif built.before is not None or built.data is not None:
        raise UserError("--continue FOLDER and --data FILE go together")
    elif output is None:
        raise UserError("give --output, the folder of the build")
    else:
        run(choices, output, plan)


def run(choices: "Choices", output: Path, plan: bool) -> None:
    """Build in a folder, or show what would be made."""
    from drafthead.lab.building.folder import BuildFolder
    from drafthead.scripts.building.stages import Building
    from drafthead.train.jobs.outputs import full_disk_named, only_writer

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
