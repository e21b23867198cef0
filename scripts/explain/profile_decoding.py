"""`drafthead explain profile`: where the time of a step goes, and what memory bandwidth allows."""

from pathlib import Path
from typing import Annotated

import typer

from drafthead.scripts import options


def main(
    *,
    model: options.Model,
    drafting: options.Drafting,
    prompts: Annotated[
        str | None,
        typer.Option(help="JSONL, Parquet or data set; a few built-in prompts by default."),
    ] = None,
    limit: options.PromptLimit = 8,
    batch: options.BatchSize = 1,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    compile: options.CompileSwitch = None,
    output: Annotated[Path | None, typer.Option(help="Folder for profile.json.")] = None,
    seed: options.Seed = 0,
) -> None:
    """Split the time of a decoding step, plainly and with a drafter.

    The ledger: milliseconds of drafting, verifying, accepting and committing in an average step,
    and of the Python code around them. Passes alone: the target over 1 to 64 tokens and the drafter
    at its sizes, outside the engine; as long as the first hardly grows, larger trees are nearly
    free. Memory: each step reads all weights, so the speed of copying is a bound. Without --draft,
    plain decoding alone.
    """
    from drafthead.infer.request.prompts import encode
    from drafthead.lab.profiling.measured import PROMPTS, measured_profile
    from drafthead.lab.races.race import RaceTerms
    from drafthead.lab.races.record import describe_run, prompt_ids
    from drafthead.lab.reports.profiling import profile_report

    decoder = drafting.decoder(model, compile)
    if prompts is None:
        ids = encode(PROMPTS[:limit], decoder.tokenizer)
    else:
        ids = prompt_ids(prompts, limit, decoder, max_new_tokens)
    terms = RaceTerms((temperature,), max_new_tokens, rounds=1, seed=seed, batch_size=batch)
    profile = measured_profile(decoder, drafting.name, ids, terms)
    about = {
        **describe_run(model.target, decoder.target), "prompts": len(ids), "batch": batch,
        "max_new_tokens": max_new_tokens, "temperature": temperature, "compiled": bool(compile),
    }  # fmt: skip
    options.finish(profile_report(profile, about), output / "profile.json" if output else None)
