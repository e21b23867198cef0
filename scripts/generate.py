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
            help="Print the log-probability of each token and of this many alternatives; 0 for no "
            "alternatives."
        ),
    ] = None,
    draft_temperature: Annotated[
        float | None,
        typer.Option(
            help="Temperature at which drafts are sampled. It changes the speed, not the "
            "distribution of the text."
        ),
    ] = None,
    compile: CompileSwitch = None,
) -> None:
    """Answer one prompt and print the speed.

    Without --draft, decoding is plain. The answer is printed to standard output while it is
    decoded, the speed to standard error. Several answers are printed with their numbers at the end.
    Penalties that you do not set with --set come from the model's generation_config.json.
    """
    with options.starting(model):
        from drafthead.scripts import terminal

        text = terminal.prompt_text(prompt)
        how = answers.options(rule, logprobs)
        decoder = drafting.decoder(model, compile, draft_temperature)
    result = terminal.print_answer(decoder, text, how)
    if result.logprobs is not None and decoder.tokenizer is not None:
        for tokens, record in zip(result.sequences, result.logprobs, strict=True):
            print("", *terminal.logprob_lines(tokens, record, decoder.tokenizer), sep="\n")
    print(terminal.summary(result), file=sys.stderr)
