"""The text of an answer while its tokens come: stop strings, drafted parts, calls of tools."""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.infer.request.stopping import FinishReason, Stop
from drafthead.infer.request.text_pieces import GrowingAnswer

CALL, END_OF_CALL = "<tool_call>", "</tool_call>"


class AnswerText(Stop):
    """The text of one answer, token by token; a stop string ends the answer and is not in it.

    Only what the answer itself says is compared with stop strings, and never half a character.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
        skip_special: bool = True,
    ):
        """`stop_ids` are tokens that end the answer; special tokens may be part of its text."""
        super().__init__((), ())
        self.growing = GrowingAnswer(tokenizer, skip_special)
        self.stops, self.stop_ids = stops, stop_ids
        self.said = ""
        self.places: list[int] = []  # where the text of each token begins
        self.drafted: list[bool] = []  # of each token that was shown
        self.stopped = False
        self.shown = self.whole = 0  # characters, and tokens whose text was shown to its end

    def __call__(self, token: int) -> FinishReason | None:
        """Why the answer ends with this token; None where it goes on."""
        before = len(self.said)
        self.places.append(before)
        if token in self.stop_ids:
            self.stopped = True
            return "stop_string"
        self.said += self.growing.add(token)
        start = max(0, before - max(map(len, self.stops), default=0))
        found = [place for stop in self.stops if (place := self.said.find(stop, start)) >= 0]
        if not found:
            return None
        self.said, self.stopped = self.said[: min(found)], True
        return "stop_string"

    def show(self, drafted: Sequence[bool], ended: bool) -> list[tuple[str, bool]]:
        """The text that can be shown now and was not before, in parts that were drafted or not.

        `drafted` is of the tokens since the last call. What may begin a stop string waits.
        """
        self.drafted += drafted
        if ended and not self.stopped:
            self.said += self.growing.rest()
        end = len(self.said) if ended else len(self.said) - held(self.said, self.stops)
        parts: list[tuple[str, bool]] = []
        while self.whole < len(self.drafted):  # tokens that were not shown to their ends
            ends = [*self.places[self.whole + 1 : self.whole + 2], len(self.said)]
            mark, is_drafted = ends[0], self.drafted[self.whole]
            if part := self.said[self.shown : min(mark, end)]:
                self.shown += len(part)
                if parts and parts[-1][1] == is_drafted:
                    part = parts.pop()[0] + part
                parts.append((part, is_drafted))
            if mark > end:  # the rest waits
                break
            self.whole += 1
        if ended and self.shown < end:
            parts.append((self.said[self.shown :], False))
        return parts


def held(text: str, marks: Sequence[str]) -> int:
    """How many last characters of a text may begin a mark: 2 of ``a<t`` for ``<tool>``."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    ends = range(longest, 0, -1)
    return next((n for n in ends if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class ToolCalls:
    """Takes calls of tools out of a text: JSON of a name and arguments in <tool_call> tags."""

    def __init__(self) -> None:
        self.waiting = ""
        self.count = 0

    def add(self, text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """What of the text is content, and the calls that are complete with it."""
        self.waiting += text
        content = ""
        calls: list[dict[str, Any]] = []
        while True:
            before, begin, after = self.waiting.partition(CALL)
            if not begin:
                kept = 0 if ended else held(before, [CALL])
                cut = len(before) - kept
                content, self.waiting = content + before[:cut], before[cut:]
                return content, calls
            body, end, rest = after.partition(END_OF_CALL)
            if not end and not ended:
                content, self.waiting = content + before, begin + after
                return content, calls
            call = self._read(body)
            content += before if call else before + begin + body + end
            calls += [call] if call else []
            self.waiting = rest

    def _read(self, body: str) -> dict[str, Any] | None:
        """A call as OpenAI writes it; None for what is none."""
        try:
            given = json.loads(body)
            arguments = given.get("arguments", given.get("parameters", {}))
            function = {"name": str(given["name"]), "arguments": json.dumps(arguments)}
        except (ValueError, AttributeError, KeyError, TypeError):
            return None
        number, self.count = self.count, self.count + 1
        name = f"call_{secrets.token_hex(12)}"
        return {"index": number, "id": name, "type": "function", "function": function}
