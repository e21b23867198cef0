"""Reading bodies: what a request may cost is counted in its bytes before anything walks it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from drafthead.serve.errors import ApiError, beyond_context, not_supported

MOST_CHOICES = 128
MOST_PARTS = 1 << 15  # texts, lists and objects of a body; parts of a field that is no prompt
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 256  # each of them is looked for after each token
MOST_BIASES = 1024
# Of prompts.
TEXTS = ("messages", "tools", "chat_template_kwargs", "input", "instructions")
HUGE = re.compile(rb"\d[eE]|\d{300}")  # in a number that may not be finite
Asked = TypeVar("Asked", bound=BaseModel)


@dataclass(frozen=True)
class Limits:
    """The most that requests to one server may cost."""

    max_length: int  # tokens of a prompt and its answer
    token_characters: int  # of the longest token

    def read(self, body: bytes, content_type: str, kind: type[Asked]) -> Asked:
        """The request of a body; raises ApiError 400, with the field, for what is none."""
        return checked(kind, self.given(body, content_type))

    def given(self, body: bytes, content_type: str) -> Mapping[str, Any]:
        """The JSON object of a body; raises ApiError 400 for none, and for one that costs too much.

        What takes long for a large body is done by functions in C, none of which makes an object
        for each part of it before these are counted.
        """
        numbers = counted(body)
        try:
            if "json" not in content_type:
                raise ValueError("Content-Type is not application/json")
            given = from_json(body, allow_inf_nan=False)
            if not isinstance(given, dict):
                raise ValueError("expected { and fields")
            if HUGE.search(numbers):
                json.dumps(given, allow_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is no JSON object: {error}") from error
        self.refuse_costly(given)
        return given

    def refuse_costly(self, given: Mapping[str, Any]) -> None:
        """Raise ApiError 400, with the name of the field, for JSON that would cost too much."""
        prompt, choices = given.get("prompt"), given.get("n")
        prompts = prompt if isinstance(prompt, list) and not is_tokens(prompt) else [prompt]
        answers = len(prompts) * (choices if isinstance(choices, int) else 1)
        if answers > MOST_CHOICES:
            field = "prompt" if len(prompts) > MOST_CHOICES else "n"
            raise ApiError(400, f"a request may have {MOST_CHOICES} answers at most", field)
        for each in prompts:
            self.refuse_long(each, "prompt")
        self.refuse_long([given.get(name) for name in TEXTS], "messages")
        self.refuse_long(given.get("tokens"), "tokens")
        stop = given.get("stop")
        given_stops = stop if isinstance(stop, list) else [stop]
        stops = [len(each) if isinstance(each, str) else 0 for each in given_stops]
        if len(stops) > MOST_STOPS or max(stops, default=0) > MOST_STOP_CHARACTERS:
            most = f"{MOST_STOPS} strings of {MOST_STOP_CHARACTERS} characters"
            raise ApiError(400, f"stop may have {most} at most", "stop")
        for field in ("logit_bias", "stop_token_ids"):
            if isinstance(given.get(field), dict | list) and len(given[field]) > MOST_BIASES:
                raise ApiError(400, f"{field} may have {MOST_BIASES} tokens at most", field)
        for field, value in given.items():
            if field not in ("prompt", "tokens", *TEXTS) and has_more_parts(value, MOST_PARTS):
                raise ApiError(400, f"{field} may have {MOST_PARTS} parts at most", field)

    def refuse_long(self, given: Any, field: str) -> None:
        """Raise ApiError 400 for texts with too many characters for the context, or too many parts.

        Texts that may just fit are counted in tokens later.
        """
        most, size, rest = self.max_length * self.token_characters, 0, [given]
        while rest and size <= most:
            part = rest.pop()
            if isinstance(part, str):
                size += len(part)
            elif isinstance(part, dict):
                rest += [*part.keys(), *part.values()]
            elif isinstance(part, list):
                size += most if len(part) > self.max_length else 0
                rest += part if len(part) <= self.max_length and not is_tokens(part) else ()
            size += 1
        if size > most:
            raise beyond_context(
                self.max_length, f"which {field} cannot fit into: shorten it", field
            )


def counted(body: bytes) -> bytes:
    """Return JSON without its texts; raises ApiError 400 for too many texts, lists and objects.

    Of ``{"a": [1, "\\""]}`` this is ``{: [1, ]}``, with two texts, a list and an object.
    """
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    texts, outside = plain.count(b'"') // 2, b""
    if texts <= MOST_PARTS:
        outside = b"".join(plain.split(b'"')[::2])
    if texts + outside.count(b"[") + outside.count(b"{") > MOST_PARTS:
        raise ApiError(400, f"a body may have {MOST_PARTS} texts, lists and objects at most")
    return outside


def has_more_parts(given: Any, most: int) -> bool:
    """Whether some JSON consists of more than so many lists, objects, texts and numbers."""
    count, rest = 0, [given]
    while rest and count + len(rest) <= most:
        part = rest.pop()
        count += 1
        if isinstance(part, dict | list):
            rest += part.values() if isinstance(part, dict) else part
    return count + len(rest) > most


def checked(kind: type[Asked], given: Mapping[str, Any]) -> Asked:
    """The fields of a request; raises ApiError 400 for the first that is wrong."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        raise not_supported(field)
    raise ApiError(400, f"{field}: {first['msg']}", field)


def is_tokens(given: Sequence[Any]) -> bool:
    """Whether a list looks like token ids."""
    return bool(given) and isinstance(given[0], int)


def longest_token(vocabulary: Mapping[str, int]) -> int:
    """Characters of the longest token of a vocabulary.

    Where tokens stand for bytes a character is written as one or more, so no text is longer.
    """
    return max(map(len, vocabulary))
