"""What the measuring verbs share: prompts, and the record of machine and command."""

import shlex
import sys

from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import Decoder
from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.infer.request.prompts import encode_one
from drafthead.train.data.conversations import read_conversations


def describe_run(name: str, target: Target) -> dict[str, object]:
    """What a reader needs to judge the numbers, or to measure again."""
    return {
        "command": shlex.join(["drafthead", *sys.argv[1:]]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "target": name,
        "dtype": str(target.dtype).removeprefix("torch."),
    }


def prompt_ids(source: str, limit: int, decoder: Decoder, max_new_tokens: int) -> list[list[int]]:
    """The first user turns of a source as token ids.

    Prompts that do not fit into the context are left out, with a message. Raises UserError when a
    conversation has no user turn, or when no prompt is left.
    """
    ids = []
    for conversation in read_conversations(source, limit=limit):
        first = next((i for i, m in enumerate(conversation.messages) if m["role"] == "user"), None)
        if first is None:
            raise UserError(f"{conversation.where} has no user message to answer")
        ids.append(encode_one(conversation.messages[: first + 1], decoder.tokenizer))
    room = decoder.max_length
    short = [row for row in ids if room is None or len(row) + max_new_tokens <= room]
    if left_out := len(ids) - len(short):
        print(f"{left_out} of {len(ids)} prompts left out: with {max_new_tokens} new tokens they "
              f"exceed the target's context of {room}")  # fmt: skip
    if not short:
        raise UserError(f"no prompt of {source} fits into the target's context of {room} tokens")
    return short
