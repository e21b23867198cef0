"""`drafthead explain trace`: what happened in each step of an answer, as a page."""

from pathlib import Path

import typer

from drafthead.core.errors import UserError
from drafthead.scripts import options


def main(
    *,
    model: options.Model,
    prompt: options.Prompt = None,
    drafting: options.Drafting,
    output: options.PageFile = Path("trace.html"),
    answers: options.Answers,
    rule: options.Rule = "auto",
) -> None:
    """Show every draft of one answer, and what was accepted.

    The page is one file and works offline. It shows the answer with accepted drafts in green and
    rejected ones struck through, the tokens of each step, the tree of each step with its
    probabilities, and the time of each phase. Steps are not compiled here; use generate or compare
    to measure speed.
    """
    from drafthead.lab.reports.trace_page import as_page
    from drafthead.lab.tracing import trace
    from drafthead.scripts.terminal import prompt_text, summary

    text = prompt_text(prompt)
    decoder = drafting.decoder(model)
    found = trace(decoder, text, **answers.options(rule))
    tokenizer = decoder.tokenizer
    if tokenizer is None:
        raise UserError(f"{model.target} has no tokenizer, so there is no text to show")
    stats, count = found.result.stats, len(found.result.sequences[0])
    about = {
        "target": model.target,
        "drafter": ", ".join(drafting.draft or ()) or "none",
        "rule": found.rule,
        "tokens": f"{count}, the first one from the pass over the prompt",
        "steps": str(stats.steps),
        "tau": f"{stats.tau:.2f} tokens per step",
    }
    options.write_page(output, as_page(found, tokenizer, about))
    typer.echo(summary(found.result), err=True)
