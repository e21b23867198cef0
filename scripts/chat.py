"""`drafthead chat`: a conversation in the terminal, whose turns keep the caches of earlier ones."""

import sys
from typing import Annotated

import typer

from drafthead.core.settings import CompileSwitch, MaxNewTokens, settings
from drafthead.scripts import options

NEW, HELP = "/new", "/help"
COMMANDS = "/new begins a new conversation, /quit or Ctrl-D ends, Ctrl-C ends an answer"


@settings(kw_only=True)
class Turns(options.Answers):
    """How the answers of a conversation are made: they may be longer."""

    max_new_tokens: MaxNewTokens = 512


def main(
    *,
    model: options.Model,
    drafting: options.Drafting,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    show_drafts: Annotated[
        bool, typer.Option(help="Colour the text that was drafted and accepted.")
    ] = False,
    turns: Turns,
    compile: CompileSwitch = None,
) -> None:
    """Talk to a model, and see after each answer how fast it was.

    Without --draft decoding is plain. Ctrl-C ends an answer, which stays as it is. /new begins a
    new conversation, /quit or Ctrl-D ends, /help says so. Messages can also come through a pipe,
    one a line.
    """
    from rich.console import Console

    from drafthead.scripts import terminal

    how = turns.options()
    decoder = drafting.decoder(model, compile)
    console = Console(highlight=False, soft_wrap=True)
    if compile:  # before the first answer, not in the middle of it
        decoder.warm_up(**how)
    session = decoder.chat(system, **how)
    if sys.stdin.isatty():
        console.print(f"{decoder}\n{COMMANDS}", style="dim", markup=False)
    for message in terminal.messages():
        if message == HELP:
            console.print(COMMANDS, style="dim")
        elif message == NEW:
            session = decoder.chat(system, **how)
        else:
            terminal.print_turn(session, message, console, show_drafts)
