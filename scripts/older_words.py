"""Older spellings of the command line, which are taken for one release.

They are rewritten before the line is read, and a line on standard error names today's spellings.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from drafthead.heads.errors import UserError

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
# What an option became: another name for the same value, or words made of its value.
Renewal: TypeAlias = str | Callable[[str], list[str]]


def drafts(kind: str) -> Renewal:
    """The renewal of an option that named a drafter of this kind."""
    return lambda value: ["--draft", f"{kind}:{value}"]


def setting(name: str) -> Renewal:
    """The renewal of an option that is a setting of transformers now."""
    return lambda value: ["--set", f"{name}={value}"]


def refused(new: str) -> Renewal:
    """The renewal of an option that the user must write in another way."""

    def refuse(value: str) -> list[str]:
        raise UserError(f"this is written {new.format(value)} now")

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
        "--typical-epsilon": refused("--rule typical:typical_epsilon={}"),
        "--typical-delta": refused("--rule typical:typical_delta={}"),
        "--lenience": refused("--rule lenient:lenience={}"),
        "--accept-top": refused("--rule top_k:accept_top={}"),
        "--accept-distance": refused("--rule distance:accept_distance={}"),
        "--min-block": refused("--rule top_k:min_block={}"),
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
    if not words:
        return []
    old = words[0]
    verb = VERBS.get(old, old).split() if old not in ("data", "head", "explain") else words[:2]
    told = [(old, " ".join(verb))] if old in VERBS else []
    rest = list(words[1:] if old in VERBS else words[len(verb) :])
    plain = " ".join(word for word in verb if not word.startswith("-"))
    options = {**OPTIONS.get(plain, {}), **OPTIONS.get(old, {})}
    found = [*verb]
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name in FLAGS and "--head" in options:
            found += FLAGS[name]
            told.append((name, " ".join(FLAGS[name])))
            continue
        new = options.get(name)
        if new is None:
            found.append(name + equals + value)
            continue
        value = value if equals or not rest else rest.pop(0)
        made = [new, value] if isinstance(new, str) else new(value)
        found += made
        told.append((f"{name} {value}", " ".join(made)))
    tell(told)
    return found


def tell(told: Sequence[tuple[str, str]]) -> None:
    """Print today's spellings of older ones, if there are any."""
    if told:
        spellings = ", ".join(f"`{old}` is now `{new}`" for old, new in told)
        print(f"drafthead: {spellings}; the next release takes this alone", file=sys.stderr)
