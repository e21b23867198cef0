"""The `drafthead` command: finds the file of a verb and prints errors as one sentence.

A verb is a file with a `main`, whose parameters are its options. `drafthead data invent` is
`data/invent.py`, `drafthead chat` is `chat.py`. Only the file of the verb that is asked for is
imported, and it imports no torch: what a verb runs with is imported within `main`. So help and
errors of usage come at once.
"""

import importlib
import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer

from drafthead.core.errors import UserError
from drafthead.scripts.options import InterruptedVerbError, with_groups

HELP = {"help_option_names": ["--help", "-h"]}


class Verb(NamedTuple):
    """A verb in a list of verbs, and in the help of its group."""

    summary: str
    example: str = ""  # what follows its name in a typical line


class Group(NamedTuple):
    """Verbs that share their first word."""

    summary: str
    verbs: dict[str, Verb]


VERBS = {
    "build": Verb("Find the fastest way to decode a model, in the time you give."),
    "chat": Verb("Chat with a model in the terminal and see the speed."),
    "generate": Verb("Answer one prompt."),
    "serve": Verb("Serve OpenAI's API, with metrics and a chat page."),
    "train": Verb("Train a head or draft model; --init writes its config file."),
    "compare": Verb("Time all methods on the same prompts: a table and a picture."),
    "verify": Verb("Test that the text is the model's own: PASS or FAIL."),
    "audit": Verb("Test a running server's text, sampling and acceptance."),
    "fetch": Verb("Download a small model to try things out."),
}
GROUPS = {
    "data": Group(
        "Training data: invent, distill, inspect, index.",
        {
            "invent": Verb(
                "Invent prompts with a chat model.",
                "--target smollm2 --number 5000 --output prompts.jsonl",
            ),
            "distill": Verb(
                "Generate the model's answers, to train heads on.",
                "--target smollm2 --prompts prompts.jsonl --output answers.jsonl",
            ),
            "inspect": Verb(
                "Show conversations and which tokens are trained on.",
                "--target smollm2 --data answers.jsonl",
            ),
            "index": Verb(
                "Count n-grams in answers, to draft without training.",
                "--target smollm2 --data answers.jsonl --output index",
            ),
        },
    ),
    "head": Group(
        "Trained heads: info, evaluate, doctor, import, export, push.",
        {
            "info": Verb("Show what a checkpoint contains, in any known format.", "runs/mine/head"),
            "evaluate": Verb(
                "Measure how many tokens a head gets accepted.",
                "runs/mine/head --target smollm2 --data test.jsonl",
            ),
            "doctor": Verb(
                "Find out why few drafts are accepted, and what to do.",
                "runs/mine/head --target smollm2 --data test.jsonl",
            ),
            "import": Verb(
                "Convert a head from another project to our format.",
                "OWNER/NAME --output runs/theirs",
            ),
            "export": Verb(
                "Export a head for another project, with a numeric check.",
                "runs/mine/head --format eagle3-vllm --output served",
            ),
            "push": Verb(
                "Upload a head to the Hugging Face hub, with a card.", "runs/mine/head OWNER/NAME"
            ),
        },
    ),
    "explain": Group(
        "Where the speed comes from: trace, tree, pays, report.",
        {
            "trace": Verb(
                "Show every draft of one answer, as a page or text.",
                '--target smollm2 --draft runs/mine/head --prompt "Why is the sky blue?"',
            ),
            "tree": Verb(
                "Show what each tree size costs and gains here.",
                "--target smollm2 --draft runs/mine/head",
            ),
            "pays": Verb(
                "Predict the speedup on another machine.",
                "--trace trace.json --cost costs.json",
            ),
            "report": Verb(
                "Collect a training run and its measurements in one page.",
                "runs/mine/head --comparison runs/race",
            ),
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
    """The command line for a line of words, of which only the verb's module is imported."""
    app = new_app()
    app.callback()(about)
    for name, verb in VERBS.items():
        add_verb(app, name, verb, words)
    for name, group in GROUPS.items():
        lines = [f"drafthead {name} {verb} {one.example}" for verb, one in group.verbs.items()]
        app.add_typer(grouped := new_app(), name=name, short_help=group.summary)
        text = "\n\n".join([group.summary, "\b\n" + "\n".join(["For example:", *lines])])
        grouped.callback(help=text)(lambda: None)
        for verb_name, verb in group.verbs.items():
            add_verb(grouped, f"{name} {verb_name}", verb, words)
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


def add_verb(app: typer.Typer, name: str, verb: Verb, words: Sequence[str]) -> None:
    """Add a verb; it can run if the words ask for it."""
    names = name.split()
    if names == list(words[: len(names)]):
        module = OTHER_FILES.get(name, name.replace(" ", "."))
        main = importlib.import_module(f"drafthead.scripts.{module}").main
        command = app.command(names[-1], short_help=verb.summary, context_settings=HELP)
        command(with_groups(main))
    else:
        app.command(names[-1], short_help=verb.summary)(lambda: None)


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


def fail(message: str, status: int) -> int:
    """Print one sentence on standard error and return the exit status."""
    print(f"drafthead: {message}", file=sys.stderr)
    return status


def missing(error: ModuleNotFoundError, requirements: Sequence[str]) -> str:
    """What to install, where a module of an extra of the requirements is not; else the error."""
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
        sys.exit(fail(str(error), 2))
    except ModuleNotFoundError as error:
        sys.exit(fail(missing(error, importlib.metadata.requires("drafthead") or []), 2))
    except OSError as error:
        sys.exit(fail(f"{error.strerror or error}: {error.filename or 'a file'}", 1))
    except (InterruptedVerbError, KeyboardInterrupt):
        sys.exit(
            fail(
                "interrupted; what was written so far is kept, and the same command continues it",
                130,
            )
        )


if __name__ == "__main__":
    main()
