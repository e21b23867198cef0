"""The options of `drafthead distill`, by what they are about."""

from pathlib import Path
from typing import Annotated

import typer

from drafthead.heads.errors import UserError

# What is asked.
Prompts = Annotated[str, typer.Option(help="A .jsonl/.json/.parquet file, folder or data set.")]
Limit = Annotated[int | None, typer.Option(help="Answer only this many rows, from the first.")]
System = Annotated[
    str | None,
    typer.Option(
        help="System message of conversations without one: the text, or @FILE.",
        metavar="TEXT|@FILE",
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
