"""Older spellings of the command line, which are taken for one release.

They are rewritten before the line is read, and a line on standard error names today's spellings.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from drafthead.core.errors import UserError

VERBS = {
    "ask-about": "data invent",
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
    "plan-training": "train --plan",
    "plan-tree": "explain tree",
    "profile": "explain profile",
    "push": "head push",
    "report": "explain report",
    "theory": "compare --theory",
    "trace": "explain trace",
    "verify-exactness": "verify",
}
GROUPS = ("data", "head", "explain")  # words that a second one follows
# What an option became: another name for the same value, or words made of its value.
Renewal: TypeAlias = str | Callable[[str], list[str]]


def drafts(kind: str) -> Renewal:
    """The renewal of an option that named a drafter of this kind."""
    return lambda value: ["--draft", f"{kind}:{value}"]


def setting(name: str) -> Renewal:
    """The renewal of an option that is a setting of transformers now."""
    return lambda value: ["--set", f"{name}={value}"]


def option_of_rule(rule: str, name: str) -> Renewal:
    """The renewal of an option that belongs to a rule now: UserError with how it is written."""

    def refuse(value: str) -> list[str]:
        option = name.replace("_", "-")
        raise UserError(f"--{option} belongs to the rule now: --rule {rule}:{name}={value}")

    return refuse


DRAFTERS: dict[str, Renewal] = {
    "--head": drafts("head"),
    "--draft-model": drafts("model"),
    "--draft-layers": drafts("layers"),
    "--datastore": drafts("ngrams"),
    "--verifier": "--rule",
}
SETTINGS = (
    "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size",
    "min_new_tokens", "max_time", "num_return_sequences", "num_beams",
)  # fmt: skip
RULES = {
    "typical_epsilon": "typical",
    "typical_delta": "typical",
    "lenience": "lenient",
    "accept_top": "top_k",
    "accept_distance": "distance",
    "min_block": "top_k",
}
HEAD: dict[str, Renewal] = {"--head": lambda value: [value]}
# By verb of today, or by older verb.
OPTIONS: dict[str, Mapping[str, Renewal]] = {
    "ask-about": {"--data": "--about"},
    "chat": DRAFTERS,
    "compare": DRAFTERS,
    "data index": {"--tokenizer": "--target"},
    "data inspect": {"--tokenizer": "--target", "--rows": "--limit"},
    "explain profile": {**DRAFTERS, "--batch": "--batch-size"},
    "explain trace": DRAFTERS,
    "explain tree": {"--head": "--draft", "--batch": "--batch-size"},
    "generate": {
        **DRAFTERS,
        **{f"--{name.replace('_', '-')}": setting(name) for name in SETTINGS},
        "--stop": lambda value: ["--set", f"stop_strings={json.dumps(value)}"],
        **{f"--{name.replace('_', '-')}": option_of_rule(RULES[name], name) for name in RULES},
    },
    "head doctor": HEAD,
    "head evaluate": HEAD,
    "verify": DRAFTERS,
}
FLAGS = {"--prompt-lookup": ["--draft", "lookup"]}  # without a value


def renewed(words: Sequence[str]) -> list[str]:
    """A command line in today's words.

    `evaluate --head mine` becomes `head evaluate mine`. Raises UserError for an option that must be
    written in another way.
    """
    verb, rest = verb_and_rest(words)
    old, new = words[: len(words) - len(rest)], verb
    changes = [] if list(old) == new else [(" ".join(old), " ".join(new))]
    name_of_verb = " ".join(word for word in verb if not word.startswith("-"))
    options = {**OPTIONS.get(name_of_verb, {}), **OPTIONS.get(" ".join(old), {})}
    found = list(verb)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        renewal = options.get(name)
        if name in FLAGS and "--head" in options:
            made = FLAGS[name]
        elif renewal is None:
            found.append(word)
            continue
        else:
            value = value if equals or not rest else rest.pop(0)
            made = [renewal, value] if isinstance(renewal, str) else renewal(value)
            name = f"{name} {value}"
        found += made
        changes.append((name, " ".join(made)))
    tell(changes)
    return found


def verb_and_rest(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Today's words for the verb of a command line, and what follows that verb."""
    first = words[0] if words else ""
    if first in VERBS:
        return VERBS[first].split(), list(words[1:])
    length = 2 if first in GROUPS else 1
    return list(words[:length]), list(words[length:])


def tell(changes: Sequence[tuple[str, str]]) -> None:
    """Print today's spellings of older ones, if there are any."""
    if changes:
        spellings = ", ".join(f"`{old}` is now `{new}`" for old, new in changes)
        print(f"drafthead: {spellings}; the next release takes this alone", file=sys.stderr)
