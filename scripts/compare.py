"""`drafthead compare`: which way of decoding is fastest here, and by how much."""

from dataclasses import field, replace
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from drafthead.core.errors import UserError
from drafthead.core.settings import AtLeastOne, CompileSwitch, TemplateArguments, settings
from drafthead.lab.races.terms import RaceTerms, Temperatures
from drafthead.scripts import options

PROMPTS, THEORY_PROMPTS = 20, 8  # unless the user says how many
UNFINISHED = "unfinished.jsonl"  # in the output's folder, until the report is written


@settings(kw_only=True)
class Race(RaceTerms):
    """Options of what everybody decodes, how often, and how prompts are read."""

    temperatures: Temperatures = ()  # of a race 0, beside theory 0 and 1
    limit: Annotated[
        AtLeastOne | None,
        Field(
            description="Number of prompts to use, from the start of the file. Default 20, with "
            "--theory 8."
        ),
    ] = None
    prompt_column: options.PromptColumn = None
    template_arguments: TemplateArguments = field(default_factory=dict)


def main(
    *,
    model: options.Model,
    prompts: options.Prompts,
    output: Annotated[
        Path, typer.Option(help="Output folder for the table as .json, .md and .png.")
    ],
    drafting: options.Drafting,
    race: Race,
    compile: CompileSwitch = None,
    theory: Annotated[
        bool,
        typer.Option(
            "--theory",
            help="Instead, compare the speedups that Leviathan et al. (2023) predict for chains of"
            " each drafter with measurements, at temperatures 0 and 1, on 8 prompts.",
        ),
    ] = False,
) -> None:
    """Time all methods on the same prompts: a table and a picture.

    Plain decoding, transformers' generate, lookup and each drafter take turns. Each --draft is
    timed alone and with lookup. In the table, "speedup" is relative to plain decoding with
    drafthead, "over generate" to transformers' model.generate, and "bound" is the speedup that tau
    and the measured phases allow. Prompts with a "category" are also listed by category if they are
    decoded one by one. With --batch-size, tokens/s count all prompts of a batch.

    Run the same command again to continue an interrupted run. docs/theory.md explains the columns
    of --theory.
    """
    if theory:
        other = {
            "--batch-size": race.batch_size > 1, "--rounds": race.rounds != 3,
            "--rule": race.verifier != "auto", "--compile": compile,
            "--tree-nodes": drafting.tree_nodes, "--prompt-column": race.prompt_column,
            "--template-argument": race.template_arguments, "--same-bits": drafting.same_bits,
        }  # fmt: skip
        options.refuse(other, "--theory decodes chains, one prompt at a time")
        compare_with_theory(model, drafting, prompts, race, output)
    else:
        options.refuse({"--same-bits": drafting.same_bits}, "a race is of passes as they are")
        run_race(model, drafting, prompts, race, compile, output)


def run_race(
    model: options.Model,
    drafting: options.Drafting,
    prompts: str,
    terms: Race,
    compile: bool | None,
    output: Path,
) -> None:
    """Race, print the table and write it; raises UserError for what cannot take part."""
    from drafthead.core.target.any_target import load_target
    from drafthead.infer.loading.loaded import DEFAULT_CHAIN
    from drafthead.lab.races import racing, record
    from drafthead.lab.reports import comparison

    terms = replace(terms, temperatures=terms.temperatures or (0.0,))
    drafts = record.drafts_by_name(drafting.draft or ())
    length = DEFAULT_CHAIN if drafting.draft_tokens is None else drafting.draft_tokens
    target = load_target(model.target, model.dtype, model.device)
    how = racing.DraftOptions(length, drafting.tree_nodes, compile, model.dtype)
    racers = racing.entrants(target, drafts, how)
    questions = record.read_prompts(
        prompts, terms.limit or PROMPTS, racers.plain, terms.max_new_tokens,
        terms.template_arguments, terms.prompt_column,
    )  # fmt: skip
    run = record.describe_run(model.target, target)
    unfinished = racing.begun_race(output / UNFINISHED, run, questions, target, [*drafts.values()])
    rows, differing = racing.run_races(racers, questions, terms, unfinished)
    notes = comparison.noise_notes(rows)
    if 0 in terms.temperatures:
        notes += comparison.divergence_notes(differing, rows, len(questions))
    about = {
        **run, "prompts": len(questions), "max_new_tokens": terms.max_new_tokens,
        "rounds": terms.rounds, "batch_size": terms.batch_size, "top_p": terms.top_p,
        "template_arguments": terms.template_arguments,
        "divergences": [vars(divergence) for divergence in differing],
    }  # fmt: skip
    options.finish(comparison.comparison_report(rows, notes, about), output / "comparison.json")
    unfinished.end()


def compare_with_theory(
    model: options.Model, drafting: options.Drafting, prompts: str, terms: Race, output: Path
) -> None:
    """Measure chains of each drafter and set what the theory predicts beside it.

    For every temperature: alpha, the chance that a drafted token is accepted, counted while
    decoding and computed from the distributions of target and draft; c, what drafting a token
    costs; the tokens per step, the speedup and the arithmetic that follow for chains of 1 to 16
    tokens, and the best length; and why what is measured differs. Passes are not recorded.
    """
    from drafthead.infer import Decoder
    from drafthead.infer.loading.loaded import DEFAULT_CHAIN
    from drafthead.lab.races import record
    from drafthead.lab.reports.theory import theory_report
    from drafthead.lab.speedup_model import MAX_CHAIN
    from drafthead.lab.theory import theory
    from drafthead.lab.theory.chains import named_chains

    length = DEFAULT_CHAIN if drafting.draft_tokens is None else drafting.draft_tokens
    if not 1 <= length <= MAX_CHAIN:
        raise UserError(f"--draft-tokens must be from 1 to {MAX_CHAIN}, got {length}")
    drafts = record.drafts_by_name(drafting.draft or ())
    if not drafts:
        raise UserError("no drafter is given: name one with --draft")
    target = model.load()
    chains = [named_chains(name, each, target, model.dtype) for name, each in drafts.items()]
    limit = terms.limit or THEORY_PROMPTS
    ids = record.prompt_ids(prompts, limit, Decoder(target), terms.max_new_tokens)
    if len(ids) < 2:
        raise UserError(
            f"{prompts} gives {len(ids)} prompt within --limit {limit}: intervals are taken over "
            "answers, so give at least 2"
        )
    temperatures = tuple(dict.fromkeys(terms.temperatures or (0.0, 1.0)))
    terms = replace(terms, temperatures=temperatures)
    found = theory.examine(target, chains, ids, terms, length)
    about = {
        **record.describe_run(model.target, target), "prompts": len(ids), "draft_tokens": length,
        "max_new_tokens": terms.max_new_tokens, "top_p": terms.top_p, "seed": terms.seed,
    }  # fmt: skip
    options.finish(theory_report(found, about), output / "theory.json")
