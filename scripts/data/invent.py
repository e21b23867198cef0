"""`drafthead data invent`: prompts without a data set, one JSON row each."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from drafthead.core.errors import UserError
from drafthead.core.settings import AtLeastOne, CompileSwitch, DeviceName, settings
from drafthead.scripts import options
from drafthead.train.jobs.outputs import ResumableRows
from drafthead.train.settings import Inventing, InventSettings


@settings(kw_only=True)
class AboutTexts:
    """Prompts that ask something of texts."""

    about: Annotated[
        str | None,
        options.OfData,
        typer.Option(
            help="Write prompts about the answers in these conversations instead. Needs no "
            "--target.",
            metavar="DATA",
        ),
    ] = None
    tasks: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with the tasks to ask for. Default: configs/prompts/tasks.yaml."
        ),
    ] = None
    passages: Annotated[
        int, typer.Option(help="Maximum passages per prompt, of about 150 tokens each.")
    ] = 6


def main(
    *,
    target: Annotated[
        str | None,
        options.OfModel,
        typer.Option(help="The chat model: a folder, a GGUF file, a hub id, or smollm2."),
    ] = None,
    inventing: Inventing,
    device: DeviceName = "auto",
    compile: CompileSwitch = None,
    number: Annotated[AtLeastOne, Field(description="Number of prompts to write.")],
    output: options.NewRows,
    texts: AboutTexts,
    overwrite: options.Overwrite = False,
) -> None:
    """Invent prompts: a chat model writes users' messages. You need no data set.

    The model continues its chat template at the user's turn. Messages that do not end, repeat
    themselves, or are nearly the same as another are dropped.

    Such messages are short. With --about DATA, no model runs; instead, prompts ask for summaries,
    translations and answers about the texts in DATA: a third about one text, a third about two, and
    a third about several passages, like those of a retriever.
    """
    if texts.about is not None:
        from drafthead.train.prompts.tasks import write_prompts

        given = texts.about, texts.tasks, number, inventing.seed, texts.passages, output
        typer.echo(f"{output}: {number} prompts about {write_prompts(*given)} texts")
        return
    if target is None:
        raise UserError("choose the model that invents prompts with --target, or use --about DATA")
    from drafthead.core.target.any_target import load_decoder_only
    from drafthead.infer import Decoder
    from drafthead.train.data.conversations import read_conversations
    from drafthead.train.prompts.invention import TooFewMessagesError, invent, log_report
    from drafthead.train.prompts.message_source import MessageSource, first_messages

    settings = InventSettings(target, bool(compile), **vars(inventing))
    ResumableRows(output, settings, overwrite).check()  # before a large model is loaded
    beginnings = inventing.beginnings
    first = first_messages(read_conversations(beginnings)) if beginnings else []
    loaded = load_decoder_only(target, inventing.dtype, device)
    decoder = Decoder.from_pretrained(loaded, compile=compile)
    source = MessageSource(decoder, settings, first)
    try:
        log_report(invent(source, output, number, overwrite), output)
    except TooFewMessagesError as error:
        raise UserError(
            f"{error}: raise --temperature or --max-new-tokens, or take another target"
        ) from error
