"""The text of an answer while its tokens come: stop strings, drafted parts, calls of tools."""

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, AnyStr

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.infer.request.messages import read_call
from drafthead.infer.request.stopping import FinishReason, Stop
from drafthead.infer.request.text_pieces import GrowingAnswer

CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"


class AnswerText(Stop):
    """The text of one answer, token by token; a stop string ends the answer and is not in it.

    Stop strings are looked for in the bytes of all tokens that the answer itself has, as
    `model.generate` does: special tokens that are not shown are among them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        bytes_of: Callable[[int], bytes],
        stops: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
        skip_special: bool = True,
        prompt: Sequence[int] = (),
        marks: Sequence[str] = (),
        least: int = 0,
    ):
        """`bytes_of` tells those of a token; `stop_ids` are tokens that end the answer.

        Special tokens may be part of its text, and `marks` always are. No stop ends an answer of
        fewer than `least` tokens.
        """
        super().__init__((), ())
        added = tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special}
        shown = {number for number in special if added[number].content in marks}
        self.hidden = special - shown if skip_special else set[int]()
        self.growing = GrowingAnswer(tokenizer, skip_special, prompt, shown)
        self.bytes_of, self.stop_ids, self.least = bytes_of, stop_ids, least
        self.stops = [stop.encode() for stop in stops]
        self.longest = max(map(len, self.stops), default=0)
        self.read = bytearray()  # of all tokens
        self.begins = list[tuple[int, bool]]()  # of each token's bytes, and whether they are shown
        self.decoded = ""
        self.places: list[int] = []  # where the text of each token begins
        self.drafted: list[bool] = []  # of each token that was shown
        self.stopped = False
        self.shown = self.whole = 0  # characters, and tokens whose text was shown to its end

    def __call__(self, token: int) -> FinishReason | None:
        """Add a token; return why the answer ends with it, or None where it goes on."""
        before = len(self.decoded)
        self.places.append(before)
        may_end = len(self.places) >= self.least
        if token in self.stop_ids and may_end:
            self.decoded, self.stopped = self.decoded + self.growing.rest(), True
            return "stop_string"
        self.decoded += self.growing.add(token)
        if not self.stops:
            return None
        old = len(self.read)
        self.begins.append((old, token not in self.hidden))
        self.read += self.bytes_of(token)
        # Those that end in this token: one that came too early is never found again.
        places = [self.read.find(stop, max(0, old + 1 - len(stop))) for stop in self.stops]
        found = [place for place in places if place >= 0]
        if not (found and may_end):
            return None
        self.decoded += self.growing.rest()
        self.decoded, self.stopped = self.decoded[: self._end_of_text(min(found))], True
        return "stop_string"

    def _end_of_text(self, place: int) -> int:
        """Count the characters of the text so far that come before a place of the bytes."""
        parts, end = list[bytes](), len(self.read)
        for begin, is_shown in reversed(self.begins):
            if end <= place:
                break
            parts += [bytes(self.read[max(begin, place) : end])] if is_shown else []
            end = begin
        return max(0, len(self.decoded) - len(b"".join(reversed(parts)).decode(errors="replace")))

    def show(self, drafted: Sequence[bool], ended: bool) -> list[tuple[str, bool]]:
        """The text that can be shown now and was not before, in parts that were drafted or not.

        `drafted` is of the tokens since the last call. What may begin a stop string waits.
        """
        self.drafted += drafted
        if ended and not self.stopped:
            self.decoded += self.growing.rest()
        end = len(self.decoded)
        if not ended:
            waiting = held(bytes(self.read[-self.longest :]), self.stops)
            end = self._end_of_text(len(self.read) - waiting)
        parts: list[tuple[str, bool]] = []
        while self.whole < len(self.drafted):  # tokens that were not shown to their ends
            ends = [*self.places[self.whole + 1 : self.whole + 2], len(self.decoded)]
            mark, is_drafted = ends[0], self.drafted[self.whole]
            if part := self.decoded[self.shown : min(mark, end)]:
                self.shown += len(part)
                if parts and parts[-1][1] == is_drafted:
                    part = parts.pop()[0] + part
                parts.append((part, is_drafted))
            if mark > end:  # the rest waits
                break
            self.whole += 1
        if ended and self.shown < end:
            parts.append((self.decoded[self.shown :], False))
        return parts


def held(text: AnyStr, marks: Sequence[AnyStr]) -> int:
    """Count the last characters, or bytes, that may begin a mark: 2 of ``a<t`` for ``<tool>``."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    ends = range(longest, 0, -1)
    return next((n for n in ends if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class Thoughts:
    """Takes what a model thinks before it answers out of a text: what <think> tags enclose."""

    def __init__(self, begun: bool):
        """`begun` says whether the prompt has opened the tag."""
        self.waiting, self.read = "", 0
        self.state = "thinking" if begun else "before"
        self.end = 0  # characters of the text up to the end of the thoughts

    def add(self, text: str, ended: bool) -> tuple[str, str]:
        """Return the text that is thought, and the text that is said."""
        self.waiting, self.read = self.waiting + text, self.read + len(text)
        thought = ""
        if self.state == "before":
            begin = self.waiting.lstrip()
            if not ended and len(begin) < len(THOUGHT) and THOUGHT.startswith(begin):
                return "", ""
            is_thought = begin.startswith(THOUGHT)
            self.state = "thinking" if is_thought else "said"
            self.waiting = begin.removeprefix(THOUGHT) if is_thought else self.waiting
        if self.state == "thinking":
            thought, mark, self.waiting = self.waiting.partition(END_OF_THOUGHT)
            if not mark:
                kept = 0 if ended else held(thought, [END_OF_THOUGHT])
                cut = len(thought) - kept
                thought, self.waiting = thought[:cut], thought[cut:]
                self.end = self.read
                return thought, ""
            self.state, self.end = "after", self.read - len(self.waiting)
        if self.state == "after":  # white space between thoughts and answer is neither
            self.waiting = self.waiting.lstrip()
            self.state = "said" if self.waiting else "after"
        said, self.waiting = self.waiting, ""
        return thought, said


class ToolCalls:
    """Takes calls of tools out of a text: JSON of a name and arguments in <tool_call> tags.

    White space between calls, and after the last of them, is no text.
    """

    def __init__(self) -> None:
        self.waiting = self.gap = ""
        self.count = 0

    def add(self, text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return the part of the text that is content, and the calls that are complete with it."""
        self.waiting += text
        content = ""
        calls: list[dict[str, Any]] = []
        while True:
            before, begin, after = self.waiting.partition(CALL)
            if not begin:
                kept = 0 if ended else held(before, [CALL])
                cut = len(before) - kept
                self.waiting = before[cut:]
                return content + self._said(before[:cut]), calls
            body, end, rest = after.partition(END_OF_CALL)
            if not end and not ended:
                self.waiting = begin + after
                return content + self._said(before), calls
            call = self._read(body)
            content += self._said(before if call else before + begin + body + end)
            calls += [call] if call else []
            self.waiting, self.gap = rest, ""

    def _said(self, text: str) -> str:
        """The text that is content, after the white space that waited for it."""
        text = self.gap + text
        self.gap = text if self.count and not text.strip() else ""
        return text.removesuffix(self.gap) if self.gap else text

    def _read(self, body: str) -> dict[str, Any] | None:
        """A call as OpenAI writes it; None for what is none."""
        try:
            given = json.loads(body)
            arguments = given.get("arguments", given.get("parameters"))
            read = read_call({"name": given["name"], "arguments": arguments})
            function = {**read, "arguments": json.dumps(read["arguments"], ensure_ascii=False)}
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            return None
        number, self.count = self.count, self.count + 1
        name = f"call_{secrets.token_hex(12)}"
        return {"index": number, "id": name, "type": "function", "function": function}
