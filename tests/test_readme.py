"""Command lines in README.md and docs/ are valid; those of README.md also run, made small."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

from drafthead.heads.formats import FORMATS
from drafthead.lab.building.choices import BuildOptions
from drafthead.lab.servers.export_for import METHODS
from drafthead.scripts import cli, options
from drafthead.scripts.building import stages

ROOT = Path(__file__).parent.parent
PROMPTS = str(ROOT / "assets" / "demo_prompts" / "validation.jsonl")
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def lines_of(text: str) -> list[list[str]]:
    """The words of each command line in a page's blocks; of optional ones, [...], all are given."""
    return [
        shlex.split(re.sub(r"\[(--[^]]*)\]", r"\1", line), comments=True)[1:]
        for block in text.split("```")[1::2]
        for line in block.splitlines()
        if line.startswith("drafthead ") and " ... " not in line
    ]


LINES = lines_of(TEXT)
DOCS = [
    words
    for page in sorted((ROOT / "docs").glob("*.md"))
    for words in lines_of(page.read_text(encoding="utf-8"))
]
EXAMPLES = [
    [name, verb, *shlex.split(example)]
    for name, group in cli.GROUPS.items()
    for verb, example in group.verbs.items()
]
VERBS = set(cli.verb_names())


def verb_of(words: list[str]) -> str:
    """The verb of a line: one word, or two."""
    (verb,) = {words[0], " ".join(words[:2])} & VERBS
    return verb


@pytest.mark.parametrize("words", [*LINES, *DOCS, *EXAMPLES], ids=" ".join)
def test_a_line_of_a_page_or_of_help_is_one_of_the_command_line(
    words, monkeypatch, tmp_path
) -> None:
    """Its verb exists, takes all its options, and lacks none; nothing is run."""
    verb = verb_of(words)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "Refusing", type("Nothing", (), {}))  # no file is there
    command = typer.main.get_command(cli.build_app(words))
    for name in verb.split():
        command = command.commands[name]
    context = command.make_context(verb, words[len(verb.split()) :])
    taken = [
        name
        for parameter in command.params
        if context.get_parameter_source(parameter.name).name == "COMMANDLINE"
        for name in (*parameter.opts, *parameter.secondary_opts)
    ]
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= {*taken}


def test_the_head_that_the_readme_builds_can_be_exported_as_it_says() -> None:
    family = BuildOptions.family
    (export,) = [words for words in LINES if verb_of(words) == "head export"]
    layouts = METHODS[export[export.index("--for") + 1]]
    assert any(family in FORMATS[layout].families for layout in layouts)


# What makes a line small, by its verb.
SMALL = {
    "build": f"--prompts {PROMPTS} --max-new-tokens 24 --family eagle3 --hours 0.02".split(),
    "head doctor": ["--limit", "4"],
    "head export": [],
    "head push": None,  # these need a network, a terminal or many minutes
    "audit": None,
    "fetch": None,
    "chat": None,
}


def shrunk(words: list[str]) -> list[str]:
    """A line that takes seconds, on the model of the tests."""
    verb, target = verb_of(words), str(ROOT / "assets" / "demo_target")
    small = SMALL[verb]
    kept = [word.replace("MODEL", target) for word in words]
    for name in [word for word in small or [] if word.startswith("--")]:
        if name in kept:
            del kept[kept.index(name) : kept.index(name) + 2]
    return [*kept, *(small or [])]


@pytest.mark.slow
def test_the_lines_of_the_readme_run_one_after_the_other(monkeypatch, tmp_path, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages, "FEWEST_TOKENS", 0)  # else a busy machine trains no head
    files: list[str] = []
    for words in LINES:
        if SMALL.get(verb_of(words)) is None:
            continue
        monkeypatch.setattr(sys, "argv", ["drafthead", *shrunk(words)])
        stages.forget_accelerate()  # each line is a process
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code, (words, capfd.readouterr().err[-2000:])
        files.append(verb_of(words))
    assert files == ["build", "head doctor", "head export"]
    assert (tmp_path / "served" / "serve.sh").exists()
