"""Shared by the measuring verbs: prompts, and the record of machine and command."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from drafthead.core.errors import UserError
from drafthead.core.target.chat_template import (
    NO_ARGUMENTS,
    TemplateArguments,
    check_template_arguments,
)
from drafthead.infer import Decoder, Target
from drafthead.infer.loading.loaded import NamedDraft, named_draft
from drafthead.infer.request.prompts import encode_one
from drafthead.infer.timing.machine import describe_machine, describe_versions
from drafthead.train.data.conversations import Conversation, read_conversations
from drafthead.train.data.left_out import LeftOut, UnusableRowError
from drafthead.train.data.supervision import (
    Rendering,
    refuse_missing_tokens,
    unread_by_template,
)

# When the user has no prompts.
QUESTIONS = (
    "Tell me about the sea.",
    "What is 17 times 23?",
    'Complete: def fibonacci(n):\n    """Return the n-th Fibonacci number."""',
    "Translate to French: Where is the station?",
    "Name five animals and what they eat.",
    "Why is the sky blue?",
    "Write a short letter to a friend who moves to another town.",
    "List the months of the year, one a line.",
)


def describe_run(name: str, target: Target) -> dict[str, object]:
    """Return what a reader needs to judge the numbers, or to measure again."""
    return {
        "command": shlex.join(["drafthead", *sys.argv[1:]]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "target": name,
        "dtype": target.precision,
    }


def drafts_by_name(drafts: Sequence[str]) -> dict[str, NamedDraft]:
    """Drafters by the names under which they are measured: `head mine` for runs/mine.

    Raises UserError for what names no drafter, and for two of one name.
    """
    found: dict[str, NamedDraft] = {}
    for draft in map(named_draft, drafts):
        words = (draft.name, Path(draft.argument).name)
        name = " ".join(dict.fromkeys(words)).strip()  # runs/head is no `head head`
        if name in found:
            raise UserError(f"two drafters are called {name}: rename the folder of one of them")
        found[name] = draft
    return found


class Prompt(NamedTuple):
    """A prompt as token ids, and what kind of request it is if its row says so."""

    ids: list[int]
    category: str | None


def read_prompts(
    source: str,
    limit: int,
    decoder: Decoder,
    max_new_tokens: int,
    template_arguments: TemplateArguments = NO_ARGUMENTS,
    prompt_column: str | None = None,
) -> list[Prompt]:
    """The first user turns of a source; `template_arguments` are of rows that have none.

    Rows that cannot be asked and prompts that do not fit into the context are left out, with a
    message. Raises UserError when no prompt is left.
    """
    assert decoder.tokenizer is not None  # a target read from disk has one
    check_template_arguments(decoder.tokenizer, template_arguments)
    prompts, left_out = [], LeftOut()
    for conversation in read_conversations(source, prompt_column, limit, left_out):
        try:
            ids = prompt_of(conversation, decoder, template_arguments)
        except UnusableRowError as error:
            left_out.leave(error)
            continue
        left_out.note_unread(unread_by_template(decoder.tokenizer, conversation))
        prompts.append(Prompt(ids, conversation.category))
    left_out.tell(source)
    if not prompts:
        raise UserError(f"no row can be used; the first: {left_out.problems[0]}")
    room = decoder.max_length
    prefix = decoder.target.answer_prefix
    short = [
        p
        for p in prompts
        if room is None or max(len(prefix(p.ids)) + max_new_tokens, len(p.ids)) <= room
    ]
    if too_long := len(prompts) - len(short):
        print(f"{too_long} of {len(prompts)} prompts left out: with {max_new_tokens} new tokens "
              f"they exceed the target's context of {room}")  # fmt: skip
    if not short:
        raise UserError(f"no prompt of {source} fits into the target's context of {room} tokens")
    return short


def prompt_of(
    conversation: Conversation, decoder: Decoder, template_arguments: TemplateArguments
) -> list[int]:
    """The ids [T] of a conversation up to its first user turn; UnusableRowError without one."""
    messages, where = conversation.messages, conversation.where
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None:
        raise UnusableRowError(f"{where} has no user message to answer")
    assert decoder.tokenizer is not None
    if decoder.target.has_encoder:
        return encode_one(messages[first]["content"], decoder.tokenizer)
    rendering = Rendering.of(decoder.tokenizer, conversation, template_arguments)
    ids = rendering.ids(messages[: first + 1], add_generation_prompt=True)
    refuse_missing_tokens(ids, decoder.target.vocab_size, decoder.tokenizer, where)
    return ids


def prompt_ids(
    source: str | None, limit: int, decoder: Decoder, max_new_tokens: int
) -> list[list[int]]:
    """The ids of `read_prompts`; without a source those of `QUESTIONS`."""
    if source is None:
        return [encode_one(text, decoder.tokenizer) for text in QUESTIONS[:limit]]
    return [prompt.ids for prompt in read_prompts(source, limit, decoder, max_new_tokens)]
