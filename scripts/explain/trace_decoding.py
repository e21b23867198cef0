"""`drafthead explain trace`: what happened in each step of an answer, as a page or as text."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from drafthead.core.errors import UserError
from drafthead.scripts import options


def main(
    *,
    model: options.Model,
    prompt: options.Prompt = None,
    drafting: options.Drafting,
    output: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("trace.html"),
    format: Annotated[
        Literal["html", "text"],
        typer.Option(
            help="text prints to the terminal in colours, or to a file as {+drafted+} and"
            " [-rejected-]."
        ),
    ] = "html",
    answers: options.Answers,
    rule: options.Rule = "auto",
) -> None:
    """Show every draft of one answer, and what was accepted.

    The page is one file and works offline. It shows the answer with accepted drafts in green and
    rejected ones struck through, the tokens of each step, the tree of each step with its
    probabilities, and the time of each phase. Steps are not compiled here; use generate or compare
    to measure speed.
    """
    from rich.console import Console

    from drafthead.core.storage.files import write_text
    from drafthead.lab.reports.trace_page import as_page, as_text
    from drafthead.lab.tracing import trace
    from drafthead.scripts.terminal import prompt_text, summary

    text = prompt_text(prompt)
    if output.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--output {output} must end in .html: it is a page for a browser")
    decoder = drafting.decoder(model)
    found = trace(decoder, text, **answers.options(rule))
    tokenizer = decoder.tokenizer
    if tokenizer is None:
        raise UserError(f"{model.target} has no tokenizer, so there is no text to show")
    stats = found.result.stats
    if format == "text":
        console = Console(highlight=False, soft_wrap=True)
        console.print(as_text(found, tokenizer, coloured=console.is_terminal))
    else:
        count = len(found.result.sequences[0])
        about = {
            "target": model.target,
            "drafter": ", ".join(drafting.draft or ()) or "none",
            "rule": found.rule,
            "tokens": f"{count}, the first one from the pass over the prompt",
            "steps": str(stats.steps),
            "tau": f"{stats.tau:.2f} tokens per step",
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, as_page(found, tokenizer, about))
        typer.echo(f"{output} is written: open it in a browser")
    typer.echo(summary(found.result), err=True)
