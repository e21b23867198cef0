"""What clients get: OpenAI's JSON of whole answers and of streams."""

import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from drafthead.infer.answers.results import Logprobs
from drafthead.infer.request.text_pieces import GrowingAnswer, texts_of
from drafthead.serve.answer_text import Thoughts, ToolCalls
from drafthead.serve.decode_loop import DecodeLoop, Job, Piece
from drafthead.serve.errors import ApiError, error_body
from drafthead.serve.json_grammar import GrammarMask
from drafthead.serve.metrics import speculation
from drafthead.serve.protocol import ChatRequest, CompletionRequest, Reader

logger = logging.getLogger(__name__)


@dataclass
class Choice:
    """One answer in the form of a request: what of it was sent, and what it has become."""

    job: Job
    reader: Reader
    is_chat: bool
    tools: ToolCalls | None
    asked: ChatRequest | CompletionRequest
    thoughts: Thoughts | None = None
    thought: str = ""
    text: str = ""
    echoed: int = 0  # characters of the prompt that the text begins with
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: dict[str, list[Any]] | None = None
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: Piece) -> dict[str, Any]:
        """The choice of a chunk for a piece, which becomes a part of the whole."""
        text, thought = piece.text, ""
        calls: list[dict[str, Any]] = []
        if self.thoughts is not None:
            thought, text = self.thoughts.add(text, piece.finish_reason is not None)
        if self.tools is not None:
            text, calls = self.tools.add(text, piece.finish_reason is not None)
            if not (isinstance(self.asked, ChatRequest) and self.asked.parallel_tool_calls):
                calls = calls[: max(0, 1 - len(self.calls))]
        self.text, self.calls = self.text + text, self.calls + calls
        self.thought += thought
        self.tokens += piece.tokens
        logprobs = None
        if piece.logprobs is not None:
            logprobs = self._logprobs(piece, piece.logprobs)
            whole = self.logprobs or {}
            self.logprobs = {
                name: [*whole.get(name, ()), *values] for name, values in logprobs.items()
            }
        reason = piece.finish_reason
        self.finish_reason = "tool_calls" if reason == "stop" and self.calls else reason
        said: dict[str, Any] = {"text": text}
        if self.is_chat:
            said = {"delta": {"content": text} | ({"tool_calls": calls} if calls else {})}
            said["delta"] |= {"reasoning_content": thought} if thought else {}
        if self.asked.return_drafted:
            said["drafted"] = [{"text": part, "drafted": drafted} for part, drafted in piece.parts]
        return self._choice(said, logprobs, piece.tokens)

    def echo(
        self, prompt: Sequence[int], record: Logprobs | None, finish_reason: str | None
    ) -> dict[str, Any]:
        """The choice of a chunk with the prompt, whose first token has no log-probability."""
        tokenizer = self.reader.decoder.tokenizer
        assert tokenizer is not None and isinstance(self.asked, CompletionRequest)
        if record is not None:
            growing = GrowingAnswer(tokenizer, self.asked.skip_special_tokens)
            places = [0, *accumulate(len(growing.add(token)) for token in prompt)][:-1]
            raw, top = [None, *record.raw], [None, *record.top]
            self.logprobs = completion_logprobs(prompt, raw, top, places, self.reader.text_of)
        given = self.asked.texts[self.job.prompt]
        [text] = texts_of([prompt], tokenizer, self.asked.skip_special_tokens)
        self.text = given if isinstance(given, str) else text
        self.echoed, self.finish_reason = len(self.text), finish_reason
        return self._choice({"text": self.text}, self.logprobs)

    def whole(self) -> dict[str, Any]:
        """The choice of a response that is no stream."""
        said: dict[str, Any] = {}
        if self.asked.return_token_ids:
            said["prompt_token_ids"] = list(self.job.request.prompts[0])
        if not self.is_chat:
            return self._choice({**said, "text": self.text}, self.logprobs, self.tokens)
        content = self.text if self.text or not self.calls else None
        calls = [{name: call[name] for name in ("id", "type", "function")} for call in self.calls]
        message = {"role": "assistant", "content": content, "refusal": None}
        message |= {"reasoning_content": self.thought} if self.thought else {}
        said["message"] = message | ({"tool_calls": calls} if calls else {})
        return self._choice(said, self.logprobs, self.tokens)

    def reason_of(self, error: ApiError) -> ApiError:
        """The error of an answer; of one whose form allows no next token it is the form's."""
        masks = [each for row in self.job.request.processors for each in row]
        forms = [each for each in masks if isinstance(each, GrammarMask)]
        for form in forms:
            if not form.allowed(self.tokens).any():
                return ApiError(
                    400, f"{form.field} is too hard to follow, or has no end", form.field
                )
        return error

    def _choice(
        self, said: dict[str, Any], logprobs: Any, tokens: Sequence[int] = ()
    ) -> dict[str, Any]:
        return {
            "index": self.job.choice,
            **said,
            **({"token_ids": list(tokens)} if self.asked.return_token_ids else {}),
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
        }

    def _logprobs(self, piece: Piece, record: Logprobs) -> dict[str, list[Any]]:
        """The log-probabilities of a piece's tokens, in the form of the request."""
        if self.is_chat:
            return {"content": chat_logprobs(piece.tokens, record, self.reader)}
        known = [self.echoed + place for place in piece.places]
        places = [*known, *[len(self.text)] * (len(piece.tokens) - len(known))]
        return completion_logprobs(
            piece.tokens, record.raw, record.top, places, self.reader.text_of
        )


def chat_logprobs(tokens: Sequence[int], record: Logprobs, reader: Reader) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities, as chat completions have them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        own = reader.grammars.bytes_of(token)
        return {"token": reader.text_of(token), "logprob": logprob, "bytes": list(own)}

    return [
        {**entry(token, raw), "top_logprobs": [entry(*other) for other in top]}
        for token, raw, top in zip(tokens, record.raw, record.top, strict=True)
    ]


def completion_logprobs(
    tokens: Sequence[int],
    raw: Sequence[float | None],
    tops: Sequence[Sequence[tuple[int, float]] | None],
    places: Sequence[int],
    text_of: Callable[[int], str],
) -> dict[str, list[Any]]:
    """Tokens with their log-probabilities, as text completions have them."""

    def named(top: Sequence[tuple[int, float]] | None) -> dict[str, float] | None:
        """Alternatives to a token by their texts."""
        if top is None:
            return None
        found: dict[str, float] = {}
        for token, value in top:  # the best of those that look alike
            found.setdefault(text_of(token), value)
        return found

    return {
        "tokens": [*map(text_of, tokens)],
        "token_logprobs": list(raw),
        "top_logprobs": [named(top) for top in tops],
        "text_offset": list(places),
    }


class Response:
    """The response to one request, as a whole or as a stream."""

    def __init__(
        self,
        asked: ChatRequest | CompletionRequest,
        jobs: Sequence[Job],
        loop: DecodeLoop,
        reader: Reader,
        model: str,
    ):
        self.asked, self.jobs, self.loop = asked, jobs, loop
        self.inbox = jobs[0].inbox
        self.is_chat = isinstance(asked, ChatRequest)
        with_tools = isinstance(asked, ChatRequest) and asked.calls_tools
        self.choices = [
            Choice(
                job,
                reader,
                self.is_chat,
                ToolCalls() if with_tools else None,
                asked,
                None if job.thinks is False else Thoughts(bool(job.thinks)),
            )
            for job in jobs
        ]
        kind = "chat.completion" if self.is_chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if self.is_chat and asked.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    @property
    def only_echo(self) -> bool:
        """Whether nothing but the prompts is asked for."""
        return isinstance(self.asked, CompletionRequest) and self.asked.max_tokens == 0

    def submit(self) -> None:
        """Queue the answers; raises ApiError 429 when too many wait."""
        if not self.only_echo:
            self.loop.submit(self.jobs)

    async def whole(self) -> dict[str, Any]:
        """The JSON of all answers."""
        async for _ in self._chunks():
            pass
        choices = [choice.whole() for choice in self.choices]
        return {**self.head, "choices": choices, "usage": self.usage(), **self.drafts()}

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events: chunks as they come, what was used, and the end."""
        try:
            if self.is_chat:
                for choice in self.choices:
                    head = {"index": choice.job.choice, "logprobs": None, "finish_reason": None}
                    yield self._event([head | {"delta": {"role": "assistant", "content": ""}}])
            async for chunk in self._chunks():
                yield self._event([chunk])
            if self.asked.with_usage:
                yield self._event([], usage=self.usage(), **self.drafts())
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error_body(error.status_code, error.detail))}\n\n"
        except Exception:
            logger.exception("a stream failed")
            yield f"data: {json.dumps(error_body(500, 'the server failed'))}\n\n"

    def _event(self, choices: list[dict[str, Any]], **others: Any) -> str:
        usage = {"usage": None} if self.asked.with_usage else {}
        return f"data: {json.dumps({**self.head, 'choices': choices, **usage, **others})}\n\n"

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        """A choice of a chunk for each piece of an answer; all answers are given up at an error."""
        open_choices = {choice.job.id: choice for choice in self.choices}
        try:
            if isinstance(self.asked, CompletionRequest) and self.asked.echo:
                for choice in self.choices:
                    yield await self._echo(choice)
            if self.only_echo:
                open_choices.clear()
            while open_choices:
                number, piece = await self.inbox.pieces.get()
                choice = open_choices[number]
                if isinstance(piece, ApiError):
                    raise choice.reason_of(piece)
                chunk = choice.add(piece)
                if piece.finish_reason is not None:
                    del open_choices[number]
                if piece.finish_reason is not None or piece.tokens:
                    yield chunk
        finally:
            if open_choices:
                self.loop.cancel([choice.job for choice in open_choices.values()])

    async def _echo(self, choice: Choice) -> dict[str, Any]:
        """A choice of a chunk with the prompt, and its log-probabilities where they are wanted."""
        prompt, top, record = choice.job.request.prompts[0], self.asked.top, None
        if top is not None:
            record = await self.loop.score(prompt, top)
        return choice.echo(prompt, record, "length" if self.only_echo else None)

    def usage(self) -> dict[str, Any]:
        """The tokens of prompts, each once, and of answers."""
        firsts = {job.prompt: job for job in reversed(self.jobs)}.values()
        prompts = sum(len(job.request.prompts[0]) for job in firsts)
        answers = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": answers,
            "total_tokens": prompts + answers,
            "prompt_tokens_details": {"cached_tokens": sum(job.reused for job in firsts)},
        }

    def account(self) -> str:
        """What was read, written and drafted, for people."""
        usage, found = self.usage(), speculation([job.metrics for job in self.jobs])
        drafted = f"{found['num_accepted_draft_tokens']} of {found['num_draft_tokens']} drafts"
        return f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens, {drafted}"

    def drafts(self) -> dict[str, Any]:
        """How drafts fared, where there were any."""
        found = speculation([job.metrics for job in self.jobs])
        return {"metrics": {"speculative_decoding": found}} if found["num_spec_steps"] else {}
