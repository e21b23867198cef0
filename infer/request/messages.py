"""Messages of a chat as the text that the model reads: nothing of them is lost on the way.

A chat template is a program. It may print a message, print something else, fail, or print nothing
of a message without a word.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.errors import UserError

Messages: TypeAlias = Sequence[Mapping[str, Any]]
OF_TOOLS = ("tool", "function", "ipython")  # templates may print them in quotes
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
    that read nothing else. Raises UserError for a content that is no text, for calls that are none,
    for a template that fails or leaves out a message or a call, and for messages that end with an
    answer where nothing says whether it goes on.
    """
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise UserError("a message needs a role, which is a text")
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
    given = [with_calls(with_text(message)) for message in messages]
    try:
        return complete(given, tokenizer, options)
    except UserError as error:
        if READS_PARTS.search(str(options.get("chat_template") or tokenizer.chat_template)):
            with suppress(UserError):
                return complete([*map(with_parts, given)], tokenizer, options)
        raise error


def with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose text parts are joined; raises UserError for what is no text."""
    parts = message.get("content")
    if parts is None and message["role"] in ("assistant", *OF_TOOLS):
        return {**message, "content": ""}
    if parts is None or isinstance(parts, str):
        return message
    for part in parts if isinstance(parts, list | tuple) else [parts]:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UserError(
                f"the message of role {message['role']!r} has a part of type {kind!r}, and only "
                "texts are decoded: leave it out"
            )
    parts = parts if isinstance(parts, list | tuple) else [parts]
    return {**message, "content": "".join(part["text"] for part in parts)}


def with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose calls of tools have objects for arguments; raises UserError for others."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    try:
        return of_calls({**message, "tool_calls": list(calls)}, read_call)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(
            "tool_calls have a function with a name, and arguments that are a JSON object"
        ) from error


def of_calls(
    message: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """A message with the function of each call changed, which some data sets have for the call."""
    calls = [
        {**call, "function": change(call["function"])} if "function" in call else change(call)
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def read_call(function: Mapping[str, Any]) -> dict[str, Any]:
    """The function of a call with an object for arguments; raises ValueError for what is none."""
    if not isinstance(function["name"], str):
        raise ValueError("the name of a function is a text")
    return {**function, "arguments": arguments_of(function.get("arguments"))}


def arguments_of(given: Any) -> dict[str, Any]:
    """The arguments of a call, which come as an object, as JSON text, encoded twice, or not at all.

    Raises ValueError for what is no object.
    """
    while isinstance(given, str):
        given = json.loads(given) if given.strip() else None
    if not isinstance(given, Mapping | None):
        raise ValueError("arguments are an object")
    return dict(given or {})


def as_template_reads(messages: Messages, write: Callable[[Messages], str]) -> tuple[Messages, str]:
    """The messages with arguments as the template reads them, and the text that it writes.

    Most templates read objects; some print them as they are, and need JSON text. `messages` have
    objects, and `write` returns the template's text or raises.
    """
    if not any(message.get("tool_calls") for message in messages):
        return messages, write(messages)
    found: list[Mapping[str, Any]] = []  # arguments

    def as_text(function: Mapping[str, Any]) -> Mapping[str, Any]:
        found.append(function["arguments"])
        return {**function, "arguments": json.dumps(found[-1], ensure_ascii=False)}

    others = [of_calls(message, as_text) for message in messages]
    try:
        text = write(messages)
    except Exception:
        with suppress(Exception):
            return others, write(others)
        raise
    in_python = [repr(each) for each in found if each and repr(each) in text]
    if in_python:
        with suppress(Exception):
            other = write(others)
            if sum(map(other.count, in_python)) < sum(map(text.count, in_python)):
                return others, other
    return messages, text


def with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose text is a part."""
    text = message.get("content")
    if not isinstance(text, str):
        return message
    return {**message, "content": [{"type": "text", "text": text}]}


def complete(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> str:
    """The chat template's text of messages; raises UserError where it leaves one out."""

    def write(each: Messages) -> str:
        return written(each, tokenizer, options)

    messages, text = as_template_reads(messages, write)
    marked, end = dict[int, Mapping[str, Any]](), 0
    for place, message in enumerate(messages):
        said = text_in(message).strip()
        found = text.find(said, end)  # after those of the messages before
        end = found + len(said) if found >= 0 else end
        # Some templates leave earlier answers out on purpose, though never their calls.
        lost = found < 0 and message["role"] != "assistant"
        if lost or message["role"] in OF_TOOLS or message.get("tool_calls"):
            marked[place] = with_mark(message, f"[{MARK} {place}]")
    # What is not there as it is was perhaps changed on the way: one text with marks in all of them.
    shown = ""
    with suppress(UserError):
        shown = write([marked.get(n, each) for n, each in enumerate(messages)]) if marked else ""
    for place in marked:
        if f"[{MARK} {place}]" in shown:
            continue
        other = [marked[n] if n == place else each for n, each in enumerate(messages)]
        if write(other) == text:
            role, calls = messages[place]["role"], messages[place].get("tool_calls")
            what = "calls of tools in the message" if calls else "message"
            instead = ": give it the role 'system'" if role == "developer" else ""
            raise UserError(
                f"the target's chat template writes nothing of the {what} of role {role!r}{instead}"
            )
    return text


def with_mark(message: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    """A message with a mark in the names of its calls, or else after its text."""
    if message.get("tool_calls"):
        return of_calls(message, lambda each: {**each, "name": f"{each['name']}{mark}"})
    other = {**message, "content": f"{text_in(message)} {mark}"}
    return other if isinstance(message.get("content") or "", str) else with_parts(other)


def text_in(message: Mapping[str, Any]) -> str:
    """The text of a message, which may be a part; empty without one."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def written(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> str:
    """The chat template's text of messages; raises UserError where it fails."""
    try:
        text = str(tokenizer.apply_chat_template([*map(dict, messages)], **options))
        text.encode()  # half of a character cannot be tokenised
    except Exception as error:  # templates are programs of their own, and raise many kinds
        roles = [message["role"] for message in messages]
        instead = "; give the developer's the role 'system'" if "developer" in roles else ""
        raise UserError(
            f"the target's chat template cannot write the messages of roles {roles}: {error}"
            f"{instead}"
        ) from error
    return text
