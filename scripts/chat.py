"""`drafthead chat`: a conversation in the terminal, whose turns keep the caches of earlier ones."""

import sys
from typing import Annotated

import typer

from drafthead.core.settings import CompileSwitch, MaxNewTokens, settings
from drafthead.scripts import options

NEW, HELP = "/new", "/help"
COMMANDS = (
    "Commands: /new starts a new conversation, /help shows this line, /quit or Ctrl-D "
    "exits. Ctrl-C stops an answer."
)


@settings(kw_only=True)
class ChatTurns(options.Answers):
    """Options of answers in a conversation: they may be longer."""

    max_new_tokens: MaxNewTokens = 512


def main(
    *,
    model: options.Model,
    drafting: options.Drafting,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    show_drafts: Annotated[bool, typer.Option(help="Show accepted drafts in green.")] = False,
    turns: ChatTurns,
    compile: CompileSwitch = None,
) -> None:
    """Chat with a model in the terminal. Each answer is followed by its speed.

    Without --draft, decoding is plain. /new starts a new conversation, /quit or Ctrl-D exits,
    Ctrl-C stops an answer and keeps its text. You can also pipe messages in, one per line.
    """
    with options.starting(model):
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
