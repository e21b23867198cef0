"""`drafthead distill`: write the target's own answers to prompts, one JSON row a conversation."""

import logging
from pathlib import Path

import typer

from drafthead.infer import Decoder
from drafthead.train.conversations import read_conversations
from drafthead.train.distillation import (
    DistillReport,
    DistillSettings,
    check_settings,
    distill,
)

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
    for problem, ids in (
        ("prompts longer than the context were skipped", report.too_long),
        ("conversations lost later turns that did not fit into the context", report.shortened),
    ):
        if ids:
            logger.info("%d %s: %s", len(ids), problem, ", ".join(ids))


def main(
    target: str = typer.Option(..., help="The frozen model: a folder or a hub id."),
    prompts: str = typer.Option(..., help="A .jsonl/.json/.parquet file, folder or data set."),
    output: str = typer.Option(..., help="JSONL file to write; run again to resume."),
    max_new_tokens: int = typer.Option(256, help="Longest answer, in tokens."),
    temperature: float = typer.Option(0.0, help="0 is greedy."),
    top_p: float = typer.Option(1.0, help="Sample from this share of the probability."),
    seed: int = typer.Option(0, help="Each row's seed is made from this and its id."),
    batch_size: int = typer.Option(32, help="Conversations decoded together."),
    limit: int | None = typer.Option(None, help="Answer only this many rows, from the first."),
    prompt_column: str | None = typer.Option(None, help="Column that holds the user's text."),
    dtype: str = typer.Option("auto", help="auto, bfloat16 or float32."),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:1, ..."),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Start the output from the beginning."
    ),
) -> None:
    """Write the target's own answers to prompts; all user turns are answered in order."""
    settings = DistillSettings(
        target=target,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        prompt_column=prompt_column,
        dtype=dtype,
    )
    if not overwrite:  # before a large model is loaded
        check_settings(Path(output), settings)
    conversations = read_conversations(prompts, prompt_column, limit)
    decoder = Decoder.from_pretrained(target, dtype=dtype, device=device)
    report = distill(decoder, conversations, Path(output), settings, batch_size, overwrite)
    log_report(report, Path(output))
