"""`drafthead generate`: decode from the shell, as `Decoder` does from Python."""

import sys
from typing import Annotated

import typer

from drafthead.core.settings import CompileSwitch
from drafthead.scripts import options


def main(
    *,
    model: options.Model,
    prompt: options.Prompt = None,
    drafting: options.Drafting,
    answers: options.Answers,
    rule: options.Rule = "auto",
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Print each token's log-probability, and so many of the target's most probable "
            "tokens beside it; 0 for none."
        ),
    ] = None,
    draft_temperature: Annotated[
        float | None,
        typer.Option(help="Temperature of sampled drafts; changes speed, never the distribution."),
    ] = None,
    compile: CompileSwitch = None,
) -> None:
    """Answer a prompt, printing the text while it is decoded, and report the speed.

    Without --draft decoding is plain. The answer goes to standard output, the speed to standard
    error. Of several answers each is printed when all are there, after its number. Penalties that
    are not --set are those of the model's own generation config.
    """
    from drafthead.scripts import terminal

    text = terminal.prompt_text(prompt)
    how = answers.options(rule, logprobs)
    decoder = drafting.decoder(model, compile, draft_temperature)
    result = terminal.print_answer(decoder, text, how)
    if result.logprobs is not None and decoder.tokenizer is not None:
        for tokens, record in zip(result.sequences, result.logprobs, strict=True):
            print("", *terminal.logprob_lines(tokens, record, decoder.tokenizer), sep="\n")
    print(terminal.summary(result), file=sys.stderr)
