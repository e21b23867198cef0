"""`drafthead theory`: what the theory of speculative decoding predicts, beside measurement."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from drafthead.heads.errors import UserError
from drafthead.heads.formats.loading import load_head
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import Decoder
from drafthead.infer.drafters.model_drafter import load_draft_model
from drafthead.infer.loaded import DEFAULT_CHAIN
from drafthead.lab.races.record import describe_run, prompt_ids
from drafthead.lab.reports.theory import theory_report
from drafthead.lab.speedup_model import MAX_CHAIN
from drafthead.lab.theory.chains import head_chains, lookup_chains, model_chains
from drafthead.lab.theory.theory import Terms, examine
from drafthead.scripts import options


def main(
    target: options.TargetName,
    prompts: Annotated[str, typer.Option(help="JSONL, Parquet or data set; at least 2 prompts.")],
    output: Annotated[Path, typer.Option(help="Folder for theory.json, .md and .png.")],
    head: options.HeadNames = None,
    draft_model: Annotated[
        list[str] | None,
        typer.Option(help="Separate draft model, with any tokenizer; repeatable."),
    ] = None,
    prompt_lookup: options.PromptLookupSwitch = False,
    draft_tokens: Annotated[
        int,
        typer.Option(
            help=f"K: tokens of the chains that are decoded with, up to {MAX_CHAIN}; a head may "
            "draft fewer."
        ),
    ] = DEFAULT_CHAIN,
    temperature: Annotated[
        list[float] | None, typer.Option(help="0 is greedy; repeatable; 0 and 1 by default.")
    ] = None,
    top_p: options.TopP = 1.0,
    max_new_tokens: options.MaxNewTokens = 128,
    limit: options.PromptLimit = 8,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
    seed: options.Seed = 0,
) -> None:
    """Set the theory of Leviathan et al. (2023) beside what is measured here.

    For every drafter, as chains, and every temperature: alpha, the chance that a drafted token is
    accepted, counted while decoding and computed from the distributions of target and draft; c,
    what drafting a token costs; the tokens per step, the speedup and the arithmetic that follow for
    chains of 1 to 16 tokens, and the best length; and why what is measured differs. Passes are not
    compiled. docs/theory.md explains each column.
    """
    if not 1 <= draft_tokens <= MAX_CHAIN:
        raise UserError(f"--draft-tokens must be from 1 to {MAX_CHAIN}, got {draft_tokens}")
    loaded = Target.from_pretrained(target, dtype, device)
    chains = [head_chains(path.name, load_head(path, loaded), loaded) for path in head or []]
    for name in draft_model or []:
        model = load_draft_model(name, loaded, dtype)
        chains.append(model_chains(Path(name).name, model, loaded))
    if prompt_lookup:
        chains.append(lookup_chains("prompt lookup", loaded))
    refuse_names([each.name for each in chains])
    ids = prompt_ids(prompts, limit, Decoder(loaded), max_new_tokens)
    if len(ids) < 2:
        raise UserError(
            f"{prompts} gives {len(ids)} prompt within --limit {limit}: intervals are taken over "
            "answers, so give at least 2"
        )
    temperatures = tuple(dict.fromkeys(temperature or (0.0, 1.0)))
    terms = Terms(temperatures, top_p, max_new_tokens, draft_tokens, seed)
    found = examine(loaded, chains, ids, terms)
    about = {
        **describe_run(target, loaded), "prompts": len(ids), "max_new_tokens": max_new_tokens,
        "top_p": top_p, "draft_tokens": draft_tokens, "seed": seed,
    }  # fmt: skip
    report = theory_report(found, about)
    report.show()
    report.write(output / "theory.json")


def refuse_names(names: Sequence[str]) -> None:
    """Raise UserError when there is nothing to examine, or when two drafters have one name."""
    if not names:
        raise UserError("no drafter is given: use --head, --draft-model or --prompt-lookup")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"two drafters are called {twice[0]}: rename the folder of one of them")
