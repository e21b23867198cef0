"""`drafthead trace`: what happened in each step of an answer, as a page or as coloured text."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from drafthead.heads.errors import UserError
from drafthead.heads.storage.files import write_text
from drafthead.infer import Decoder
from drafthead.lab.reports.trace_page import as_page, as_text
from drafthead.lab.tracing import Trace
from drafthead.lab.tracing import trace as trace_decoding
from drafthead.scripts import options
from drafthead.scripts.generate import prompt_text, summary


def main(
    target: options.TargetName,
    prompt: Annotated[
        str | None, typer.Option(help="The user's message; by default standard input.")
    ] = None,
    head: options.HeadName = None,
    draft_model: options.DraftModelName = None,
    draft_layers: options.DraftLayers = None,
    prompt_lookup: options.PromptLookupSwitch = False,
    datastore: options.DatastoreFolder = None,
    template_argument: options.TemplateArgument = None,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("trace.html"),
    format: Annotated[
        Literal["html", "text"],
        typer.Option(help="text prints colours, or {+drafted+} and [-rejected-] into a file."),
    ] = "html",
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    verifier: Annotated[str, typer.Option(help="As for generate; auto is lossless.")] = "auto",
    tree_nodes: options.TreeNodes = None,
    draft_tokens: options.DraftTokens = None,
    seed: options.Seed = 0,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
) -> None:
    """Show which tokens of an answer were drafted, and what became of every proposal.

    The page is one file that works offline: the answer with accepted drafts in green and rejected
    ones struck through, the tokens that each step brought, the tree of each step with its
    probabilities, and the time of each phase. Steps are eager here; generate and compare are for
    measuring speed.
    """
    text = prompt_text(prompt)
    if output.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--output {output} must end in .html: it is a page for a browser")
    draft = options.draft_names(head, draft_model, draft_layers, prompt_lookup, datastore)
    decoder = Decoder.from_pretrained(
        target, draft, tree_nodes, draft_tokens, dtype=dtype, device=device
    )
    trace = trace_decoding(
        decoder,
        text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        verifier=verifier,
        seed=seed,
        chat_template_kwargs=options.template_values(template_argument),
    )
    tokenizer = decoder.tokenizer
    if tokenizer is None:
        raise UserError(f"{target} has no tokenizer, so there is no text to show")
    if format == "text":
        console = Console(highlight=False, soft_wrap=True)
        console.print(as_text(trace, tokenizer, coloured=console.is_terminal))
    else:
        own = draft_layers and f"layers {draft_layers}"
        kinds = head, draft_model, own, datastore, "prompt lookup" if prompt_lookup else "none"
        drafter = str(next(kind for kind in kinds if kind))
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, as_page(trace, tokenizer, about(trace, target, drafter)))
        typer.echo(f"{output} is written: open it in a browser")
    typer.echo(summary(trace.result), err=True)


def about(trace: Trace, target: str, drafter: str) -> dict[str, str]:
    """What the head of the page says."""
    stats = trace.result.stats
    return {
        "target": target,
        "drafter": drafter,
        "rule": trace.rule,
        "tokens": f"{len(trace.result.sequences[0])}, the first one from the pass over the prompt",
        "steps": str(stats.steps),
        "tau": f"{stats.tau:.2f} tokens a step",
    }
