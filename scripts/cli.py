"""The `drafthead` command: finds the file of a verb and prints errors as one sentence.

A verb is a file with a `main`, whose parameters are its options. `drafthead data invent` is
`data/invent.py`, `drafthead chat` is `chat.py`. Such a file imports no torch: what a verb runs with
is imported within `main`. So help and errors of usage come at once.
"""

import importlib
import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, NamedTuple, NoReturn

import typer

from drafthead.core.errors import UserError
from drafthead.scripts.options import InterruptedVerbError, with_groups

HELP = {"help_option_names": ["--help", "-h"]}


VERBS = ("build", "chat", "generate", "serve", "train", "compare", "verify", "audit", "fetch")


class Group(NamedTuple):
    """Verbs that share their first word."""

    summary: str
    verbs: dict[str, str]  # what follows each verb in a typical line


GROUPS = {
    "data": Group(
        "Training data: invent, distill, inspect, index.",
        {
            "invent": "--target smollm2 --number 5000 --output prompts.jsonl",
            "distill": "--target smollm2 --prompts prompts.jsonl --output answers.jsonl",
            "inspect": "--target smollm2 --data answers.jsonl",
            "index": "--target smollm2 --data answers.jsonl --output index",
        },
    ),
    "head": Group(
        "Trained heads: info, evaluate, doctor, import, export, push.",
        {
            "info": "runs/mine/head",
            "evaluate": "runs/mine/head --target smollm2 --data test.jsonl",
            "doctor": "runs/mine/head --target smollm2 --data test.jsonl",
            "import": "OWNER/NAME --output runs/theirs",
            "export": "runs/mine/head --for vllm --output served",
            "push": "runs/mine/head OWNER/NAME",
        },
    ),
    "explain": Group(
        "Where the speed comes from: trace, tree, report.",
        {
            "trace": '--target smollm2 --draft runs/mine/head --prompt "Why is the sky blue?"',
            "tree": "--target smollm2 --draft runs/mine/head",
            "report": "runs/mine/head --comparison runs/race",
        },
    ),
}
# Verbs whose file has another name: a file called `trace.py` would hide Python's own module when a
# script beside it is launched by path, and no import statement can name `import.py`.
OTHER_FILES = {
    "data inspect": "data.inspect_data",
    "explain trace": "explain.trace_decoding",
    "head export": "head.export_head",
    "head import": "head.import_head",
}


def verb_names() -> list[str]:
    """All verbs as they are typed: `chat`, `data invent`."""
    grouped = (f"{group} {verb}" for group, (_, verbs) in GROUPS.items() for verb in verbs)
    return [*VERBS, *grouped]


def build_app(words: Sequence[str]) -> typer.Typer:
    """The command line for a line of words, with the verbs that its first word leaves possible."""
    first = next(iter(words), "")
    app = new_app()
    app.callback()(about)
    for verb in [first] if first in VERBS else VERBS:
        add_verb(app, verb)
    for name, group in GROUPS.items():
        lines = [f"drafthead {name} {verb} {example}" for verb, example in group.verbs.items()]
        app.add_typer(grouped := new_app(), name=name, short_help=group.summary)
        text = "\n\n".join([group.summary, "\b\n" + "\n".join(["For example:", *lines])])
        grouped.callback(help=text)(lambda: None)
        for verb in group.verbs if name == first else ():
            add_verb(grouped, f"{name} {verb}")
    return app


def new_app() -> typer.Typer:
    """An empty command line, or a group of one."""
    return typer.Typer(
        context_settings=HELP,
        rich_markup_mode=None,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )


def add_verb(app: typer.Typer, name: str) -> None:
    """Add a verb; the first sentence about its `main` is what lists of verbs show."""
    module = OTHER_FILES.get(name, name.replace(" ", "."))
    main = importlib.import_module(f"drafthead.scripts.{module}").main
    app.command(name.split()[-1], context_settings=HELP)(with_groups(main))


def show_version(wanted: bool) -> None:
    """Print the version and end, if that is wanted."""
    if wanted:
        print(importlib.metadata.version("drafthead"))
        raise typer.Exit


VERSION = typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")


def about(
    version: Annotated[bool, VERSION] = False,
) -> None:
    """Decode several tokens per pass of a language model, with the same text."""


def fail(message: str, status: int) -> NoReturn:
    """Print one sentence on standard error and end with the exit status."""
    print(f"drafthead: {message}", file=sys.stderr)
    sys.exit(status)


def missing(error: ModuleNotFoundError, requirements: Sequence[str]) -> str:
    """The extra to install for a module that is missing; raises the error for other modules."""
    module = (error.name or "").partition(".")[0]
    for line in requirements:
        project, extra = re.match(r"[\w.-]*", line), re.search(r'extra == "(\w+)"', line)
        if project and extra and project[0].replace("-", "_") == module:
            return f"{module} is not installed: pip install 'drafthead[{extra[1]}]'"
    raise error


def main() -> None:
    """Run the verb; bad input ends with one sentence and exit status 2, Ctrl-C with 130."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)  # warnings of other libraries
    logging.getLogger("drafthead").setLevel(logging.INFO)
    if not sys.stderr.isatty():  # downloads show their progress in a terminal, not in a log
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # else two lines for each time it retries
    try:
        words = sys.argv[1:]
        build_app(words)(words)
    except UserError as error:
        fail(str(error), 2)
    except ModuleNotFoundError as error:
        fail(missing(error, importlib.metadata.requires("drafthead") or []), 2)
    except OSError as error:
        fail(f"{error.strerror or error}: {error.filename or 'a file'}", 1)
    except (InterruptedVerbError, KeyboardInterrupt):
        fail("interrupted; what was written so far is kept, and the same command continues it", 130)


if __name__ == "__main__":
    main()
