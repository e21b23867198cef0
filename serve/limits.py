"""What a request may cost: looked at in its JSON, before it is checked, tokenised or decoded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from drafthead.serve.errors import ApiError
from drafthead.serve.protocol import MOST_CHOICES

MOST_STOPS, MOST_STOP_CHARACTERS = 16, 256  # each of them is looked for after each token
MOST_BIASES = 1024
TEXTS = ("messages", "tools", "chat_template_kwargs", "input", "instructions")  # of prompts


@dataclass(frozen=True)
class Limits:
    """What the requests to one server may cost."""

    max_length: int  # tokens of a prompt and its answer
    token_characters: int  # of the longest token

    async def __call__(self, request: Request) -> None:
        """Refuse the JSON of a request that would cost too much; what is no JSON costs nothing."""
        if request.method != "POST":
            return
        try:
            given = await request.json()
        except (ValueError, RecursionError):
            return
        if isinstance(given, dict):
            self.refuse_costly(given)

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
        stop, bias = given.get("stop"), given.get("logit_bias")
        given_stops = stop if isinstance(stop, list) else [stop]
        stops = [len(each) if isinstance(each, str) else 0 for each in given_stops]
        if len(stops) > MOST_STOPS or max(stops, default=0) > MOST_STOP_CHARACTERS:
            most = f"{MOST_STOPS} strings of {MOST_STOP_CHARACTERS} characters"
            raise ApiError(400, f"stop may have {most} at most", "stop")
        if isinstance(bias, dict) and len(bias) > MOST_BIASES:
            raise ApiError(400, f"logit_bias may have {MOST_BIASES} tokens at most", "logit_bias")

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
            raise ApiError(
                400,
                f"a prompt and its answer have at most {self.max_length} tokens here, which "
                f"{field} cannot fit into: shorten it",
                field,
            )


def is_tokens(given: Sequence[Any]) -> bool:
    """Whether a list looks like token ids."""
    return bool(given) and isinstance(given[0], int)


def longest_token(vocabulary: Mapping[str, int]) -> int:
    """Characters of the longest token of a vocabulary.

    Where tokens stand for bytes a character is written as one or more, so no text is longer.
    """
    return max(map(len, vocabulary))
