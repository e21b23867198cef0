"""What the measuring verbs share: prompts, and the record of machine and command."""

import shlex
import sys
from typing import NamedTuple

from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import Decoder
from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.infer.request.prompts import encode_one
from drafthead.train.data.conversations import read_conversations
from drafthead.train.data.token_table import Reading, TokenTable, token_table

ROW = 1024  # tokens of given answers; longer conversations are cut


def describe_run(name: str, target: Target) -> dict[str, object]:
    """What a reader needs to judge the numbers, or to measure again."""
    return {
        "command": shlex.join(["drafthead", *sys.argv[1:]]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "target": name,
        "dtype": target.precision,
    }


class Prompt(NamedTuple):
    """A prompt as token ids, and what kind of request it is if its row says so."""

    ids: list[int]
    category: str | None


def read_prompts(source: str, limit: int, decoder: Decoder, max_new_tokens: int) -> list[Prompt]:
    """The first user turns of a source.

    Prompts that do not fit into the context are left out, with a message. Raises UserError when a
    conversation has no user turn, or when no prompt is left.
    """
    prompts = []
    for conversation in read_conversations(source, limit=limit):
        first = next((i for i, m in enumerate(conversation.messages) if m["role"] == "user"), None)
        if first is None:
            raise UserError(f"{conversation.where} has no user message to answer")
        asked = conversation.messages[: first + 1]
        source = asked[first]["content"]  # what an encoder reads
        ids = encode_one(source if decoder.target.has_encoder else asked, decoder.tokenizer)
        prompts.append(Prompt(ids, conversation.category))
    room = decoder.max_length
    prefix = decoder.target.answer_prefix
    short = [
        p
        for p in prompts
        if room is None or max(len(prefix(p.ids)) + max_new_tokens, len(p.ids)) <= room
    ]
    if left_out := len(prompts) - len(short):
        print(f"{left_out} of {len(prompts)} prompts left out: with {max_new_tokens} new tokens "
              f"they exceed the target's context of {room}")  # fmt: skip
    if not short:
        raise UserError(f"no prompt of {source} fits into the target's context of {room} tokens")
    return short


def read_answers(source: str, limit: int, target: Target) -> TokenTable:
    """The first conversations of a source as tokens.

    Raises UserError for data that cannot be read or has no answers.
    """
    assert target.tokenizer is not None  # a target read from disk has one
    longest = min(ROW, target.max_length or ROW)
    return token_table(Reading(source, None, longest, limit), target.tokenizer)


def prompt_ids(source: str, limit: int, decoder: Decoder, max_new_tokens: int) -> list[list[int]]:
    """The ids of `read_prompts`."""
    return [prompt.ids for prompt in read_prompts(source, limit, decoder, max_new_tokens)]
