"""`drafthead invent-prompts`: a chat model writes users' messages, one JSON row each."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from drafthead.heads.target.target import Target
from drafthead.infer import Decoder
from drafthead.scripts import options
from drafthead.train.data.conversations import read_conversations
from drafthead.train.prompts.invention import InventReport, check_settings, invent
from drafthead.train.prompts.message_source import InventSettings, MessageSource, first_messages

logger = logging.getLogger(__name__)


def log_report(report: InventReport, output: Path) -> None:
    """Log how many messages were kept and dropped, and why."""
    if not report.tokens:
        logger.info("%s: %d prompts were there already", output, report.kept)
        return
    speed = report.tokens / report.seconds
    logger.info("%s: %d prompts; %.0f tokens/s drawn", output, report.kept, speed)
    drawn = report.kept + sum(report.dropped.values())
    logger.info("kept %.1f %% of %d messages", 100 * report.kept / drawn, drawn)
    for reason, count in sorted(report.dropped.items(), key=lambda item: -item[1]):
        logger.info("dropped %.1f %%: %s", 100 * count / drawn, reason)


def main(
    target: options.TargetName,
    number: Annotated[int, typer.Option(help="Prompts to write.", callback=options.at_least_one)],
    output: Annotated[Path, typer.Option(help="JSONL file to write; run again to resume.")],
    system: Annotated[
        str | None, typer.Option(help="System message instead of the template's own.")
    ] = None,
    beginnings: Annotated[
        str | None,
        typer.Option(
            help="Texts (as --prompts of distill) whose beginnings are continued; a base model "
            "needs them."
        ),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: Annotated[float, typer.Option(help="Above 0; lower is less varied.")] = 1.0,
    top_p: options.TopP = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed and settings, same file.")] = 0,
    batch_size: options.BatchSize = 128,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
    compile: options.CompileSwitch = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start the output from the beginning.")
    ] = False,
) -> None:
    """Let a chat model write users' messages: prompts for distill without any data set.

    The model gets its chat template up to the user's turn and goes on. Messages that have no end,
    repeat themselves or are nearly the same as another are left out.
    """
    settings = InventSettings(
        target, system, beginnings, max_new_tokens, temperature, top_p, seed, batch_size, dtype,
        compile,
    )  # fmt: skip
    if output.exists() and not overwrite:  # before a large model is loaded
        check_settings(output, settings)
    texts = first_messages(read_conversations(beginnings)) if beginnings else []
    loaded = Target.from_pretrained(target, dtype, device)
    decoder = Decoder.from_pretrained(loaded, compile=compile)
    source = MessageSource(decoder, settings, texts)
    log_report(invent(source, output, number, overwrite), output)
