"""Older spellings of the command line, which are taken for one release.

Each one is rewritten before the line is read, and a line on standard error names the new spelling.
"""

import sys
from collections.abc import Sequence

VERBS = {
    "ask-about": "ask_about",
    "build-datastore": "data index",
    "distill": "data distill",
    "doctor": "head doctor",
    "evaluate": "head evaluate",
    "export": "head export",
    "import": "head import",
    "info": "head info",
    "inspect-data": "data inspect",
    "invent-prompts": "data invent",
    "merge-answers": "data merge",
    "plan-training": "plan_training",
    "plan-tree": "explain tree",
    "profile": "explain profile",
    "push": "head push",
    "report": "explain report",
    "trace": "explain trace",
    "verify-exactness": "verify",
}
# Options of older verbs -> what they became.
OPTIONS = {
    "build-datastore": {"--tokenizer": "--target"},
    "inspect-data": {"--tokenizer": "--target", "--rows": "--limit"},
    "plan-tree": {"--batch": "--batch-size"},
    "profile": {"--batch": "--batch-size"},
}


def renewed(words: Sequence[str]) -> list[str]:
    """A command line in today's words.

    `inspect-data --rows=5` becomes `data inspect --limit=5`.
    """
    if not words or words[0] not in VERBS:
        return list(words)
    old, verb = words[0], VERBS[words[0]]
    tell(old, verb)
    names = OPTIONS.get(old, {})
    options = (word.partition("=") for word in words[1:])
    return [*verb.split(), *(names.get(name, name) + sign + rest for name, sign, rest in options)]


def tell(old: str, new: str) -> None:
    """Print the new spelling of an old one."""
    print(f"drafthead: `{old}` is now `{new}`; this release takes both", file=sys.stderr)
