"""`drafthead compare`: which way of decoding is fastest here, and by how much."""

from pathlib import Path
from typing import Annotated

import typer

from drafthead.heads.target.any_target import load_target
from drafthead.infer.drafters.layer_choice import chosen_layers
from drafthead.infer.drafters.model_drafter import load_draft_model
from drafthead.infer.loaded import DEFAULT_CHAIN, store_lookup
from drafthead.scripts import options
from drafthead.scripts.measuring.racing import Drafters, RaceTerms, run_races
from drafthead.scripts.measuring.record import describe_run, read_prompts
from drafthead.scripts.reports.comparison import (
    divergence_notes,
    predictions,
    print_report,
    write_report,
)


def main(
    target: options.TargetName,
    prompts: Annotated[
        str,
        typer.Option(
            help="JSONL, Parquet or data set; Spec-Bench's question file works unchanged."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for comparison.json, .md and .png.")],
    head: options.HeadNames = None,
    draft_model: options.DraftModelName = None,
    draft_layers: options.DraftLayers = None,
    datastore: options.DatastoreFolder = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="0 is greedy; repeatable.")
    ] = None,
    top_p: options.TopP = 1.0,
    max_new_tokens: options.MaxNewTokens = 128,
    prompt_column: options.PromptColumn = None,
    template_argument: options.TemplateArgument = None,
    batch_size: options.BatchSize = 1,
    limit: options.PromptLimit = 20,
    rounds: Annotated[int, typer.Option(help="Times that every prompt is decoded.")] = 3,
    tree_nodes: options.TreeNodes = None,
    draft_tokens: options.DraftTokens = None,
    compile: options.CompileSwitch = False,
    verifier: Annotated[
        str,
        typer.Option(
            help="auto is lossless; typical and lenient are lossy and need a temperature, top_k "
            "and distance are lossy and need temperature 0."
        ),
    ] = "auto",
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
    seed: options.Seed = 0,
) -> None:
    """Time plain decoding, transformers' generate, draft model, own layers, lookup and heads.

    All decode the same prompts, in turns. "speedup" is over plain decoding on this engine, "over
    generate" over transformers' model.generate; "bound" is the speedup that tau and the measured
    phases allow. Where prompts have a "category", as Spec-Bench's have, the categories are listed
    as well, if prompts are decoded one by one. With --batch-size so many are decoded together, and
    tokens/s are those of all rows. On a CPU bfloat16 is faster only if the processor computes in
    it.
    """
    temperatures = tuple(temperature or [0.0])
    terms = RaceTerms(temperatures, max_new_tokens, rounds, verifier, seed, batch_size, top_p)
    loaded = load_target(target, dtype, device)
    assistant = load_draft_model(draft_model, loaded, dtype) if draft_model else None
    chain = DEFAULT_CHAIN if draft_tokens is None else draft_tokens
    stored = store_lookup(datastore, False, loaded)
    own_layers = () if draft_layers is None else chosen_layers(draft_layers, loaded)
    drafters = Drafters(
        loaded, head or [], assistant, chain, [tree_nodes], compile, with_lookup=True,
        stored=stored, own_layers=own_layers,
    )  # fmt: skip
    arguments = options.template_values(template_argument)
    questions = read_prompts(
        prompts, limit, drafters.plain, max_new_tokens, arguments, prompt_column
    )
    rows, differing = run_races(drafters, questions, terms, assisted=True)
    notes = predictions(rows)
    if 0 in temperatures:
        notes += divergence_notes(differing, rows, len(questions))
    print_report(rows, notes)
    about = {
        **describe_run(target, loaded), "prompts": len(questions), "max_new_tokens": max_new_tokens,
        "rounds": rounds, "batch_size": batch_size, "top_p": top_p, "template_arguments": arguments,
        "divergences": [vars(divergence) for divergence in differing],
    }  # fmt: skip
    write_report(rows, notes, about, output)
