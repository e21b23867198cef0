"""What is asked of a target: system messages, several samples, turns, their seeds and hashes."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.train.data.conversations import Conversation, Message

# What `encode_prompt` passes itself; `tools` and `documents` are the user's as any other.
RESERVED = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {
    "tools",
    "documents",
    "kwargs",
}


def with_system(conversations: Sequence[Conversation], system: str | None) -> list[Conversation]:
    """The conversations, each with a system message; those that begin with one keep theirs."""
    if system is None:
        return list(conversations)
    message: Message = {"role": "system", "content": system}
    return [
        one
        if one.messages[0]["role"] == "system"
        else replace(one, messages=[message, *one.messages])
        for one in conversations
    ]


def sampled(
    conversations: Sequence[Conversation], samples: int, temperature: float
) -> list[Conversation]:
    """Each conversation `samples` times, under the ids ID, ID#2, ID#3 and so on.

    The seed of a row follows from its id, so more samples leave the first ones as they are.
    Raises UserError where all samples would be the same, and for an id that is there twice.
    """
    if samples < 1:
        raise UserError(f"--samples must be at least 1, got {samples}")
    if samples > 1 and temperature == 0:
        raise UserError(
            f"--samples {samples} at temperature 0 would write the same answer {samples} times: "
            "raise --temperature, or leave --samples out"
        )
    numbered = [
        replace(one, id=one.id if number == 1 else f"{one.id}#{number}")
        for one in conversations
        for number in range(1, samples + 1)
    ]
    seen: set[str] = set()
    for one in numbered:
        if one.id in seen:
            raise UserError(
                f"{one.where}: the id {one.id} is that of another row's sample: give all rows of "
                "the prompts ids of their own"
            )
        seen.add(one.id)
    return numbered


def check_template_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> None:
    """Raise UserError for an argument that the tokenizer's chat template does not read."""
    template = tokenizer.chat_template
    name = tokenizer.name_or_path or "this tokenizer"
    for argument in arguments:
        if not template:
            raise UserError(
                f"{name} has no chat template, so --template-argument {argument} has no meaning"
            )
        if argument in RESERVED:
            raise UserError(
                f"--template-argument {argument} is not the template's: it is set by distillation"
            )
        if not re.search(rf"\b{argument}\b", str(template)):
            raise UserError(
                f"the chat template of {name} does not read {argument}: correct the name of this "
                "--template-argument, or leave it out"
            )


def user_turns(conversation: Conversation) -> list[list[Message]]:
    """The messages to send before each answer; answers found in the source are left out.

    [system, user 1, assistant, user 2] gives [[system, user 1], [user 2]]. Raises UserError if
    nothing is asked or if a message depends on an answer of another model (tool results).
    """
    turns: list[list[Message]] = []
    pending: list[Message] = []
    for message in conversation.messages:
        if message["role"] not in ("system", "user", "assistant"):
            raise UserError(
                f"{conversation.where}: a message of role `{message['role']}` belongs to another "
                "model's answer and cannot be replayed; remove the row"
            )
        if message["role"] == "assistant":
            continue
        pending.append(message)
        if message["role"] == "user":
            turns.append(pending)
            pending = []
    if not turns:
        raise UserError(f"{conversation.where}: no user message to answer")
    return turns


def row_seed(seed: int, row_id: str, turn: int) -> int:
    """The sampling seed of one answer, in [0, 2^63): the same in any batch and any run."""
    digest = hashlib.blake2b(f"{seed}\n{turn}\n{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def question_hash(turns: Sequence[Sequence[Message]]) -> str:
    """A hash of all messages that are sent to the target."""
    texts = [(message["role"], message["content"]) for turn in turns for message in turn]
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()
