"""What is asked of a target: system messages, several samples, turns, their seeds and hashes."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from drafthead.heads.errors import UserError
from drafthead.train.data.conversations import Conversation
from drafthead.train.data.left_out import UnusableRowError
from drafthead.train.data.row_forms import Message

ASKED = ("system", "developer", "user")  # roles whose messages can be sent to another model


def with_system(conversations: Sequence[Conversation], system: str | None) -> list[Conversation]:
    """The conversations, each with a system message; those that begin with one keep theirs."""
    if system is None:
        return list(conversations)
    message: Message = {"role": "system", "content": system}
    return [
        one
        if one.messages[0]["role"] in ("system", "developer")
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


def user_turns(conversation: Conversation) -> list[list[Message]]:
    """The messages to send before each answer; answers found in the source are left out.

    [system, user 1, assistant, user 2] gives [[system, user 1], [user 2]]. Raises UnusableRowError
    if nothing is asked or if a message depends on an answer of another model (tool results).
    """
    turns: list[list[Message]] = []
    pending: list[Message] = []
    for message in conversation.messages:
        if message["role"] not in (*ASKED, "assistant"):
            raise UnusableRowError(
                f"{conversation.where}: a message of role `{message['role']}` belongs to another "
                "model's answer and cannot be replayed"
            )
        if message["role"] == "assistant":
            continue
        pending.append(message)
        if message["role"] == "user":
            turns.append(pending)
            pending = []
    if not turns:
        raise UnusableRowError(f"{conversation.where}: no user message to answer")
    return turns


def row_seed(seed: int, row_id: str, turn: int) -> int:
    """The sampling seed of one answer, in [0, 2^63): the same in any batch and any run."""
    digest = hashlib.blake2b(f"{seed}\n{turn}\n{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def question_of(conversation: Conversation) -> str:
    """A hash of all that is sent to the target of one row: messages and template arguments.

    Raises UnusableRowError as `user_turns` does.
    """
    turns = user_turns(conversation)
    asked: list[object] = [(message["role"], message["content"]) for t in turns for message in t]
    if conversation.template_arguments:
        asked.append(conversation.template_arguments)
    text = json.dumps(asked, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
