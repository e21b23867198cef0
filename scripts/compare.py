"""`drafthead compare`: who is fastest on this machine, and by how much against which baseline."""

from pathlib import Path
from typing import Annotated

import typer

from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import DEFAULT_CHAIN
from drafthead.infer.measuring.comparison import Divergence
from drafthead.scripts import options
from drafthead.scripts.measuring import describe_run, prompt_ids
from drafthead.scripts.racing import Drafters, RaceTerms, run_races
from drafthead.scripts.reports.comparison import predictions, print_report, write_report

LISTED_DIVERGENCES = 10


def main(
    target: options.TargetName,
    prompts: Annotated[
        str,
        typer.Option(help="JSONL, Parquet or data set; Spec-Bench's question file as it is."),
    ],
    output: Annotated[Path, typer.Option(help="Folder for comparison.json, .md and .png.")],
    head: Annotated[list[Path] | None, typer.Option(help="Trained head; repeatable.")] = None,
    draft_model: options.DraftModelName = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="0 is greedy; repeatable.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    limit: options.PromptLimit = 20,
    rounds: Annotated[int, typer.Option(help="Times that everything is decoded.")] = 3,
    tree_nodes: options.TreeNodes = None,
    draft_tokens: options.DraftTokens = DEFAULT_CHAIN,
    compile: options.CompileSwitch = False,
    verifier: Annotated[
        str,
        typer.Option(
            help="auto is lossless; typical and lenient are lossy and need a temperature."
        ),
    ] = "auto",
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
    seed: options.Seed = 0,
) -> None:
    """Time plain decoding, transformers' generate, draft model, prompt lookup and heads.

    All decode the same prompts, taking turns. Speedup is over plain decoding on this engine,
    "over generate" over transformers' model.generate; the bound is what tau and the measured
    phases allow. On a CPU bfloat16 pays only where the processor computes in it.
    """
    if limit < 1:
        raise UserError(f"limit must be at least 1, got {limit}")
    terms = RaceTerms(tuple(temperature or [0.0]), max_new_tokens, rounds, verifier, seed)
    loaded = Target.from_pretrained(target, dtype, device)
    assistant = Target.from_pretrained(draft_model, dtype, device) if draft_model else None
    drafters = Drafters(loaded, head or [], assistant, draft_tokens, [tree_nodes], compile)
    ids = prompt_ids(prompts, limit, drafters.plain, max_new_tokens)
    rows, differing = run_races(drafters, ids, terms, assisted=True)
    notes = [*predictions(rows), *divergence_notes(differing, len(ids))]
    print_report(rows, notes)
    about = {
        **describe_run(target, loaded),
        "prompts": len(ids),
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
        "divergences": [vars(divergence) for divergence in differing],
    }
    write_report(rows, notes, about, output)
    print(f"written: {output / 'comparison.json'}, comparison.md, comparison.png")


def divergence_notes(found: list[Divergence], prompts: int) -> list[str]:
    """Sentences about greedy answers that differ from plain decoding's."""
    if not found:
        return [f"greedy answers: all equal to plain decoding's on {prompts} prompts"]
    notes = [f"greedy answers: {len(found)} differ from plain decoding's; first differences:"]
    notes += [
        f"- {d.mode}, prompt {d.prompt}, token {d.position}: {d.token} instead of {d.plain_token}, "
        f"top-2 logit gap {d.top2_gap:.4f}"
        for d in sorted(found, key=lambda d: -d.top2_gap)[:LISTED_DIVERGENCES]
    ]
    return notes
