"""`drafthead chat`: a conversation in the terminal, whose turns keep the caches of earlier ones."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from drafthead.heads.formats.printing import visible
from drafthead.infer import Decoder
from drafthead.infer.engine.results import DecodeStats
from drafthead.infer.request.decode_options import DecodeOptions
from drafthead.infer.request.text_pieces import GrowingAnswer
from drafthead.infer.serving.chat_session import ChatSession
from drafthead.scripts import options

PROMPT = "> "
NEW, QUIT = "/new", "/quit"
DRAFTED = "green"


def main(
    target: options.TargetName,
    head: options.HeadName = None,
    draft_model: options.DraftModelName = None,
    draft_layers: options.DraftLayers = None,
    prompt_lookup: options.PromptLookupSwitch = False,
    datastore: options.DatastoreFolder = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    template_argument: options.TemplateArgument = None,
    show_drafts: Annotated[
        bool, typer.Option(help="Colour the text that was drafted and accepted.")
    ] = False,
    max_new_tokens: options.MaxNewTokens = 512,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    compile: options.CompileSwitch = False,
    seed: options.Seed = 0,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
) -> None:
    """Talk to a model, and see after each answer how fast it was.

    --head, --draft-model or --draft-layers; --prompt-lookup or --datastore alone or beside one of
    them, whose trees then have the best guesses of both; with none of them, plain decoding.
    Ctrl-C ends an answer, which stays as it is. /new begins a new conversation, /quit or Ctrl-D
    ends. Messages can also come through a pipe, one a line.
    """
    draft = options.draft_names(head, draft_model, draft_layers, prompt_lookup, datastore)
    decoder = Decoder.from_pretrained(target, draft, dtype=dtype, device=device, compile=compile)
    console = Console(highlight=False, soft_wrap=True)
    how: DecodeOptions = {
        "max_new_tokens": max_new_tokens, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "seed": seed,
        "chat_template_kwargs": options.template_values(template_argument),
    }  # fmt: skip
    if compile:  # before the first answer, not in the middle of it
        decoder.warm_up(**how)
    session = decoder.chat(system, **how)
    for message in messages():
        if message == NEW:
            session = decoder.chat(system, **how)
        else:
            answer(session, message, console, show_drafts)


def messages() -> Iterator[str]:
    """What the user writes, line by line, until /quit or the end of the input."""
    shown = PROMPT if sys.stdin.isatty() else ""
    while True:
        try:
            message = input(shown).strip()
        except EOFError:
            return
        if message == QUIT:
            return
        if message:
            yield message


def answer(session: ChatSession, message: str, console: Console, show_drafts: bool) -> None:
    """Print the answer to a message while it is decoded, then a line about its speed."""
    passes = session.steps(message)
    text = GrowingAnswer(session.tokenizer)
    try:
        for tokens in passes:
            for place, token in enumerate(tokens):
                drafted = show_drafts and place < len(tokens) - 1
                console.print(Text(visible(text.add(token)), DRAFTED if drafted else ""), end="")
        console.print(Text(visible(text.rest())))
    except KeyboardInterrupt:
        console.print()
    finally:
        passes.close()
    console.print(Text(summary(passes.stats, session.reused), "dim"))


def summary(stats: DecodeStats, reused: int) -> str:
    """One line about an answer: tokens, speed, tau, and how much of the prompt was read before."""
    tokens = sum(stats.decoded_tokens) + len(stats.decoded_tokens)
    return (
        f"[{tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, tau {stats.tau:.2f}, "
        f"{reused} positions of the prompt reused]"
    )
