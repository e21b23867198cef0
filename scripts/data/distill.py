"""`drafthead distill`: write the target's own answers to prompts, one JSON row a conversation."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from drafthead.heads.target.target import Target
from drafthead.infer import Decoder
from drafthead.scripts import options
from drafthead.train.data.conversations import read_conversations
from drafthead.train.distillation.answers import DistillReport, distill
from drafthead.train.distillation.output_file import DistilledFile, DistillSettings
from drafthead.train.jobs.full_disk import full_disk_named

logger = logging.getLogger(__name__)


def log_report(report: DistillReport, output: Path) -> None:
    """Log what was written, and the rows that were left out."""
    speed = report.tokens / report.seconds if report.seconds else 0.0
    logger.info(
        "%s: %d rows written, %d were there before; %s tokens at %.0f tokens/s",
        output,
        report.written,
        report.already_done,
        f"{report.tokens:,}",
        speed,
    )
    if report.answers_cut:
        logger.info(
            "%d answers were cut before their end (raise --max-new-tokens)", report.answers_cut
        )
    if report.answers_repeated:
        logger.info("%d answers were ended where they repeat themselves", report.answers_repeated)
    for problem, ids in (
        ("prompts longer than the context were skipped", report.too_long),
        ("conversations lost later turns that did not fit into the context", report.shortened),
    ):
        if ids:
            logger.info("%d %s: %s", len(ids), problem, ", ".join(ids))


def main(
    target: options.TargetName,
    prompts: Annotated[str, typer.Option(help="A .jsonl/.json/.parquet file, folder or data set.")],
    output: Annotated[str, typer.Option(help="JSONL file to write; run again to resume.")],
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: Annotated[int, typer.Option(help="Each row's seed is made from this and its id.")] = 0,
    batch_size: Annotated[
        int, typer.Option(help="Conversations at a time; 8 times as many are written together.")
    ] = 32,
    limit: Annotated[
        int | None, typer.Option(help="Answer only this many rows, from the first.")
    ] = None,
    prompt_column: Annotated[
        str | None, typer.Option(help="Column that holds the user's text.")
    ] = None,
    end_repetition: Annotated[
        bool, typer.Option(help="End answers whose last 32 tokens occurred twice before.")
    ] = True,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
    compile: options.CompileSwitch = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start the output from the beginning.")
    ] = False,
) -> None:
    """Write the target's own answers to prompts; all user turns are answered in order."""
    settings = DistillSettings(
        target,
        prompts,
        max_new_tokens,
        temperature,
        top_p,
        seed,
        prompt_column,
        dtype,
        batch_size,
        end_repetition,
    )
    path = Path(output)
    with full_disk_named(path), DistilledFile(path, settings, overwrite) as file:
        conversations = read_conversations(prompts, prompt_column, limit)
        loaded = Target.from_pretrained(target, dtype, device)
        decoder = Decoder.from_pretrained(loaded, compile=compile)
        log_report(distill(decoder, conversations, file), path)
