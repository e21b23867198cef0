"""Messages of a chat as the text that the model reads: nothing of them is lost on the way.

A chat template is a program. It may print a message, print something else, fail, or print nothing
of a message without a word.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError

Messages: TypeAlias = Sequence[Mapping[str, Any]]
# Whose messages templates print as they are; of answers and tools some leave a part out on purpose.
PRINTED = ("system", "developer", "user")
MARK = "and so on"  # what is added to a text to see whether the template prints it
READS_PARTS = re.compile(r"""\.type\b|\[\s*['"]type['"]\s*\]|\.get\(\s*['"]type['"]""")


def rendered(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any],
    continue_final_message: bool | None,
) -> str:
    """The text of messages, to be tokenised without special tokens.

    Text parts are joined for templates that do not read parts, and texts become parts for those
    that read nothing else. Raises UserError for parts that are no text, for a template that fails
    or leaves a message out, and for messages that end with an answer where nothing says whether it
    goes on.
    """
    if continue_final_message is None and messages[-1]["role"] == "assistant":
        raise UserError(
            "the last message is the assistant's: set continue_final_message to True to go on with "
            "it, or to False for an answer of its own"
        )
    goes_on = bool(continue_final_message)
    options = {
        **options,
        "tokenize": False,
        "continue_final_message": goes_on,
        "add_generation_prompt": not goes_on,
    }
    given = [with_text(message) for message in messages]
    try:
        return complete(given, tokenizer, options)
    except UserError as error:
        if READS_PARTS.search(str(options.get("chat_template") or tokenizer.chat_template)):
            with suppress(UserError):
                return complete([*map(with_parts, given)], tokenizer, options)
        raise error


def with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose text parts are joined; raises UserError for parts that are no text."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple):
        return message
    for part in parts:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UserError(
                f"the message of role {message['role']!r} has a part of type {kind!r}, and only "
                "texts are decoded: leave it out"
            )
    return {**message, "content": "".join(part["text"] for part in parts)}


def with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose text is a part."""
    text = message.get("content")
    if not isinstance(text, str):
        return message
    return {**message, "content": [{"type": "text", "text": text}]}


def complete(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> str:
    """What the chat template makes of messages; raises UserError where it leaves one out."""
    text = written(messages, tokenizer, options)
    for place, message in enumerate(messages):
        role, said = message["role"], text_in(message)
        if role not in PRINTED or said.strip() in text:
            continue
        # Perhaps it was changed on the way.
        other: Mapping[str, Any] = {**message, "content": f"{said} {MARK}"}
        other = other if isinstance(message["content"], str) else with_parts(other)
        if written([*messages[:place], other, *messages[place + 1 :]], tokenizer, options) == text:
            instead = ": give it the role 'system'" if role == "developer" else ""
            raise UserError(
                f"the target's chat template writes nothing of the message of role {role!r}"
                f"{instead}"
            )
    return text


def text_in(message: Mapping[str, Any]) -> str:
    """The text of a message, which may be a part; empty without one."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def written(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> str:
    """What the chat template makes of messages; raises UserError where it fails."""
    try:
        return str(tokenizer.apply_chat_template([*map(dict, messages)], **options))
    except Exception as error:  # templates are programs of their own, and raise many kinds
        roles = [message["role"] for message in messages]
        instead = "; give the developer's the role 'system'" if "developer" in roles else ""
        raise UserError(
            f"the target's chat template cannot write the messages of roles {roles}: {error}"
            f"{instead}"
        ) from error
