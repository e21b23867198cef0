"""The options of `drafthead distill`, by what they are about."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from drafthead.heads.errors import UserError

# What is asked.
Prompts = Annotated[str, typer.Option(help="A .jsonl/.json/.parquet file, folder or data set.")]
PromptColumn = Annotated[str | None, typer.Option(help="Column that holds the user's text.")]
Limit = Annotated[int | None, typer.Option(help="Answer only this many rows, from the first.")]
System = Annotated[
    str | None,
    typer.Option(
        help="System message of conversations without one: the text, or @FILE.",
        metavar="TEXT|@FILE",
    ),
]
TemplateArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--template-argument",
        help="Of the chat template, its value as JSON: enable_thinking=false. May be repeated.",
        metavar="NAME=VALUE",
    ),
]

# How it is answered.
Seed = Annotated[int, typer.Option(help="Each row's seed is made from this and its id.")]
Samples = Annotated[
    int, typer.Option(help="Answers to each prompt, at a temperature above 0: rows ID, ID#2, ...")
]
BatchSize = Annotated[
    int, typer.Option(help="Conversations at a time; 8 times as many are written together.")
]
EndRepetition = Annotated[
    bool, typer.Option(help="End answers whose last 32 tokens occurred twice before.")
]
DropCut = Annotated[
    bool, typer.Option("--drop-cut", help="Leave out rows with an answer that reached its limit.")
]

# Where it is answered, and written.
Server = Annotated[
    str | None,
    typer.Option(help="Address of an OpenAI-compatible server that answers; key: OPENAI_API_KEY."),
]
ServerModel = Annotated[
    str | None, typer.Option(help="The target's name on the server, if that has several models.")
]
Output = Annotated[str, typer.Option(help="JSONL file to write; run again to resume.")]
ShardOfAll = Annotated[
    str | None,
    typer.Option(
        "--shard",
        help="Answer one of several parts, into a file of its own: 1/4 to 4/4; then merge-answers.",
        metavar="NUMBER/COUNT",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start the output from the beginning.")
]


def system_text(given: str | None) -> str | None:
    """The system message of --system; raises UserError for a file that cannot be read."""
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--system {given}: the file cannot be read as text ({error})") from error


def template_values(given: list[str] | None) -> dict[str, Any]:
    """The arguments by name; raises UserError for one that is not NAME=VALUE with a JSON value."""
    values: dict[str, Any] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not name.isidentifier() or not equals:
            raise UserError(f"--template-argument is written NAME=VALUE, got {one}")
        if name in values:
            raise UserError(f"--template-argument {name} is given twice")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(
                f"--template-argument {one}: {value or 'nothing'} is no JSON; write true, false, "
                f"numbers, or text in double quotes: '{name}=\"text\"'"
            ) from error
    return values
