"""`drafthead chat`: what it prints, and how a conversation goes on."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from tiny import target_folder
from typer import Typer
from typer.testing import CliRunner

from drafthead.core.printing import visible
from drafthead.infer import Decoder
from drafthead.scripts import chat, terminal
from drafthead.scripts.options import with_groups

pytestmark = pytest.mark.usefixtures("steady_steps")
GREEN, RESET = "\x1b[32m", "\x1b[0m"


folder = target_folder(max_position_embeddings=512, initializer_range=0.02)


def decoder(folder: Path) -> Decoder:
    return Decoder.from_pretrained(folder, draft="lookup", dtype="float32", device="cpu")


def talk(folder: Path, *lines: str, more: Sequence[str] = ()) -> str:
    """What the verb prints for lines of standard input."""
    app = Typer()
    app.command()(with_groups(chat.main))
    options = ["--target", str(folder), "--draft", "lookup", "--max-new-tokens", "40", *more]
    result = CliRunner().invoke(app, [*options, "--dtype", "float32"], "\n".join(lines))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_answers_are_those_of_generate_each_with_its_speed(folder: Path):
    printed = talk(folder, "hello", "", "and then?")
    session = decoder(folder).chat(max_new_tokens=40)
    for message in ("hello", "and then?"):
        text = visible(session.say(message))
        found, _, printed = printed.partition("\n[")
        assert found == text
        figures, _, printed = printed.partition("]\n")
        assert "tokens/s, tau" in figures and f"{session.reused} positions" in figures
    assert printed == ""


def test_help_is_a_command_and_an_answer_that_is_cut_says_so(folder: Path):
    printed = talk(folder, "/help", "hello")
    assert printed.startswith(chat.COMMANDS + "\n")
    (reason,) = decoder(folder).generate("hello", max_new_tokens=40).finish_reasons
    assert reason == "length" and printed.count("; cut off: raise --max-new-tokens for more]") == 1


def test_graphs_are_made_before_the_first_answer(folder: Path, monkeypatch: pytest.MonkeyPatch):
    uncompiled, made = decoder(folder), []
    monkeypatch.setattr(Decoder, "from_pretrained", lambda *_, **how: uncompiled)
    monkeypatch.setattr(Decoder, "warm_up", lambda self, **how: made.append(how))
    monkeypatch.setattr(terminal, "print_turn", lambda *_: made.append("answer"))
    talk(folder, "hello")
    assert made == ["answer"]
    talk(folder, "hello", more=["--compile", "--temperature", "0.7"])
    assert made[1]["temperature"] == 0.7 and made[1]["max_new_tokens"] == 40
    assert made[2:] == ["answer"]


def test_a_new_conversation_knows_nothing_of_the_old_one(folder: Path):
    once = talk(folder, "hello").split("\n[")[0]
    answers = talk(folder, "hello", "/new", "hello", "/quit", "never asked").split("]\n")
    assert [each.split("\n[")[0] for each in answers] == [once, once, ""]
    assert "0 positions of the prompt reused" in answers[1]


def test_drafted_text_is_coloured_and_the_text_is_the_same(folder: Path):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system="standard", soft_wrap=True)
    session = decoder(folder).chat(max_new_tokens=40)
    terminal.print_turn(session, "hello", console, show_drafts=True)
    shown = output.getvalue().rpartition("\n\x1b[2m[")[0]
    assert shown.replace(GREEN, "").replace(RESET, "") == visible(session.messages[-1]["content"])
    stats = decoder(folder).generate(
        [{"role": "user", "content": "hello"}], max_new_tokens=40
    ).stats  # fmt: skip
    drafted = sum(length - 1 for length in stats.accept_lengths[0])
    assert drafted > 0 and 0 < shown.count(GREEN) <= drafted


def test_an_answer_that_is_interrupted_stays_and_the_conversation_goes_on(
    folder: Path, monkeypatch
):
    session = decoder(folder).chat(max_new_tokens=40)
    pieces = []

    def interrupt(text: str) -> str:
        pieces.append(text)
        if len(pieces) == 6:
            raise KeyboardInterrupt
        return text

    monkeypatch.setattr(terminal, "visible", interrupt)
    console = Console(file=io.StringIO())
    terminal.print_turn(session, "hello", console, show_drafts=False)
    assert session.messages[-1]["content"].startswith("".join(pieces[:5]))
    monkeypatch.undo()
    terminal.print_turn(session, "go on", console, show_drafts=False)
    assert len(session.messages) == 4


def test_control_characters_of_an_answer_do_not_reach_the_terminal():
    assert visible("a\x1b[2Jb\tc\nd\u202e") == "a\\x1b[2Jb\tc\nd\\u202e"
