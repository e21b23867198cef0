"""`drafthead compare`: which way of decoding is fastest here, and by how much."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from drafthead.contrib.own_layers.own_layers import chosen_layers
from drafthead.heads.target.any_target import load_target
from drafthead.heads.target.target import Target
from drafthead.infer.drafters.model_drafter import load_draft_model
from drafthead.infer.loaded import DEFAULT_CHAIN, store_lookup
from drafthead.lab.races.racing import DraftOptions, RaceTerms, entrants, run_races
from drafthead.lab.races.record import Prompt, describe_run, read_prompts
from drafthead.lab.races.unfinished_race import UnfinishedRace
from drafthead.lab.reports.comparison import (
    comparison_report,
    divergence_notes,
)
from drafthead.scripts import options
from drafthead.train.jobs.weights import weights_fingerprint

UNFINISHED = "unfinished.jsonl"  # in the output's folder, until the report is written


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
    it. After a stop the same command goes on with the answers that it had.
    """
    temperatures = tuple(temperature or [0.0])
    terms = RaceTerms(temperatures, max_new_tokens, rounds, verifier, seed, batch_size, top_p)
    loaded = load_target(target, dtype, device)
    assistant = load_draft_model(draft_model, loaded, dtype) if draft_model else None
    chain = DEFAULT_CHAIN if draft_tokens is None else draft_tokens
    stored = None if datastore is None else store_lookup(datastore, loaded)
    own_layers = () if draft_layers is None else chosen_layers(draft_layers, loaded)
    drafts = DraftOptions(chain, tree_nodes, compile)
    racers = entrants(loaded, head or [], assistant, own_layers, stored, drafts)
    arguments = options.template_values(template_argument)
    questions = read_prompts(prompts, limit, racers.plain, max_new_tokens, arguments, prompt_column)
    run = describe_run(target, loaded)
    files = [*(head or []), *(Path(name) for name in (datastore,) if name)]
    models = [loaded, *([assistant] if assistant else [])]
    unfinished = begun_race(output / UNFINISHED, run, questions, models, files)
    rows, differing = run_races(racers, questions, terms, unfinished)
    notes = divergence_notes(differing, rows, len(questions)) if 0 in temperatures else []
    about = {
        **run, "prompts": len(questions), "max_new_tokens": max_new_tokens,
        "rounds": rounds, "batch_size": batch_size, "top_p": top_p, "template_arguments": arguments,
        "divergences": [vars(divergence) for divergence in differing],
    }  # fmt: skip
    report = comparison_report(rows, notes, about)
    report.show()
    report.write(output / "comparison.json")
    unfinished.end()


def begun_race(
    path: Path,
    run: dict[str, object],
    questions: Sequence[Prompt],
    models: Sequence[Target],
    files: Sequence[Path],
) -> UnfinishedRace:
    """The race that an earlier run has begun, or a new one; a line says if there was one.

    It is the same race if command, machine and versions in `run`, prompts, weights of the models
    and files are the same. Heads on the hub are known by their names alone.
    """
    made_of = {
        **run,
        "prompts": questions,
        "weights": [weights_fingerprint(model) for model in models],
        "files": {str(path): states(path) for path in files},
    }
    race = UnfinishedRace(path, made_of)
    if race.begun and race.changed:
        print(f"{path} is of another race (not the same: {', '.join(race.changed)}): begins anew")
    elif race.batches:
        print(f"{path}: goes on after {len(race.batches)} batches of prompts, which are kept")
    return race


def states(path: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a file or of the files in a folder; none of what is not here."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path] * path.is_file()
    found = [(file.relative_to(path).as_posix(), file.stat()) for file in files if file.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
