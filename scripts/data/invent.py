"""`drafthead data invent`: prompts without a data set, one JSON row each."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from drafthead.core.errors import UserError
from drafthead.core.settings import AtLeastOne, CompileSwitch, DeviceName, settings
from drafthead.scripts import options
from drafthead.train.settings import Inventing, InventSettings


@settings(kw_only=True)
class AboutTexts:
    """Prompts that ask something of texts."""

    about: Annotated[
        str | None,
        typer.Option(
            help="Instead of inventing, ask about the answers in these conversations; needs no "
            "--target.",
            metavar="DATA",
        ),
    ] = None
    tasks: Annotated[
        Path | None,
        typer.Option(help="What is asked: YAML as configs/prompts/tasks.yaml, the default."),
    ] = None
    passages: Annotated[
        int, typer.Option(help="Most passages of a prompt about texts, of about 150 tokens each.")
    ] = 6


def main(
    *,
    target: Annotated[
        str | None, typer.Option(help="The chat model: folder, GGUF file or hub id.")
    ] = None,
    inventing: Inventing,
    device: DeviceName = "auto",
    compile: CompileSwitch = None,
    number: Annotated[AtLeastOne, Field(description="Prompts to write.")],
    output: Annotated[Path, typer.Option(help="JSONL file to write; run again to resume.")],
    texts: AboutTexts,
    overwrite: options.Overwrite = False,
) -> None:
    """Let a chat model write users' messages: prompts for distill without any data set.

    The model gets its chat template up to the user's turn and goes on. Messages that have no end,
    repeat themselves or are nearly the same as another are left out.

    Such messages are short. With --about DATA no model runs: the prompts ask for summaries,
    translations and answers about texts, which are answers that a model has written. A third is
    about one text, a third about two, a third about several passages, as of a retriever.
    """
    if texts.about is not None:
        from drafthead.train.prompts.tasks import write_prompts

        given = texts.about, texts.tasks, number, inventing.seed, texts.passages, output
        typer.echo(f"{output}: {number} prompts about {write_prompts(*given)} texts")
        return
    if target is None:
        raise UserError("--target is the model that invents prompts: give it, or --about DATA")
    from drafthead.core.target.any_target import load_decoder_only
    from drafthead.infer import Decoder
    from drafthead.train.data.conversations import read_conversations
    from drafthead.train.prompts.invention import (
        TooFewMessagesError,
        check_settings,
        invent,
        log_report,
    )
    from drafthead.train.prompts.message_source import MessageSource, first_messages

    settings = InventSettings(target, bool(compile), **vars(inventing))
    if output.exists() and not overwrite:  # before a large model is loaded
        check_settings(output, settings)
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
