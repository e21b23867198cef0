"""Responses to clients: OpenAI's JSON of whole answers and of streams."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
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
from drafthead.serve.protocol import Asked, ChatRequest, CompletionRequest, Reader

logger = logging.getLogger(__name__)


@dataclass
class Choice:
    """One answer in the form of a request: what of it was sent, and what it has become."""

    job: Job
    reader: Reader
    asked: Asked
    tools: ToolCalls | None = None
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
        text, thought, ended = piece.text, "", piece.finish_reason is not None
        calls: list[dict[str, Any]] = []
        if self.thoughts is not None:
            thought, text = self.thoughts.add(text, ended)
        if self.tools is not None:
            text, calls = self.tools.add(text, ended)
            if not (isinstance(self.asked, ChatRequest) and self.asked.parallel_tool_calls):
                calls = calls[: max(0, 1 - len(self.calls))]
        logprobs = None if piece.logprobs is None else self._logprobs(piece, piece.logprobs)
        for name, values in (logprobs or {}).items():
            self.logprobs = self.logprobs or {}
            self.logprobs[name] = [*self.logprobs.get(name, ()), *values]
        self.text, self.calls = self.text + text, self.calls + calls
        self.thought += thought
        self.tokens += piece.tokens
        called = piece.finish_reason == "stop" and self.calls
        self.finish_reason = "tool_calls" if called else piece.finish_reason
        said: dict[str, Any] = {"text": text}
        if isinstance(self.asked, ChatRequest):
            delta = {"content": text} | ({"tool_calls": calls} if calls else {})
            said = {"delta": delta | ({"reasoning_content": thought} if thought else {})}
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
            record = Logprobs([], [None, *record.raw], [None, *record.top])  # type: ignore[list-item]
            self.logprobs = completion_logprobs(prompt, record, places, self.reader)
        given = self.asked.texts[self.job.prompt]
        [text] = texts_of([prompt], tokenizer, self.asked.skip_special_tokens)
        self.text = given if isinstance(given, str) else text
        self.echoed, self.finish_reason = len(self.text), finish_reason
        return self._choice({"text": self.text}, self.logprobs)

    @property
    def prompt_ids(self) -> dict[str, list[int]]:
        """The tokens of the prompt, where they are asked for."""
        ids = self.job.request.prompts[0]
        return {"prompt_token_ids": list(ids)} if self.asked.return_token_ids else {}

    def whole(self) -> dict[str, Any]:
        """The choice of a response that is no stream."""
        if not isinstance(self.asked, ChatRequest):
            said = {"text": self.text, **self.prompt_ids}
            return self._choice(said, self.logprobs, self.tokens)
        content = self.text if self.text or not self.calls else None
        calls = [{name: call[name] for name in ("id", "type", "function")} for call in self.calls]
        message = {"role": "assistant", "content": content, "refusal": None}
        message |= {"reasoning_content": self.thought} if self.thought else {}
        message |= {"tool_calls": calls} if calls else {}  # type: ignore[dict-item]
        return self._choice({**self.prompt_ids, "message": message}, self.logprobs, self.tokens)

    def reason_of(self, error: ApiError) -> ApiError:
        """The error of an answer; of one whose form allows no next token it is the form's."""
        masks = [each for row in self.job.request.processors for each in row]
        for form in masks:
            if isinstance(form, GrammarMask) and not form.allowed(self.tokens).any():
                sentence = f"{form.field} is too hard to follow, or has no end"
                return ApiError(400, sentence, form.field)
        return error

    def _choice(
        self, said: dict[str, Any], logprobs: Any, tokens: Sequence[int] = ()
    ) -> dict[str, Any]:
        refusal = {"refusal": None} if isinstance(self.asked, ChatRequest) else {}
        return {
            "index": self.job.choice,
            **said,
            **({"token_ids": list(tokens)} if self.asked.return_token_ids else {}),
            "logprobs": logprobs and {**logprobs, **refusal},
            "finish_reason": self.finish_reason,
        }

    def _logprobs(self, piece: Piece, record: Logprobs) -> dict[str, list[Any]]:
        """The log-probabilities of a piece's tokens, in the form of the request."""
        if isinstance(self.asked, ChatRequest):
            return {"content": chat_logprobs(piece.tokens, record, self.reader)}
        known = [self.echoed + place for place in piece.places]
        places = [*known, *[len(self.text)] * (len(piece.tokens) - len(known))]
        return completion_logprobs(piece.tokens, record, places, self.reader)


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
    tokens: Sequence[int], record: Logprobs, places: Sequence[int], reader: Reader
) -> dict[str, list[Any]]:
    """Tokens with their log-probabilities, as text completions have them."""

    def named(top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Alternatives to a token by their texts: the best, which comes first, of equal ones."""
        found: dict[str, float] = {}
        for token, value in top:
            found.setdefault(reader.text_of(token), value)
        return found

    return {
        "tokens": [*map(reader.text_of, tokens)],
        "token_logprobs": list(record.raw),
        "top_logprobs": [None if top is None else named(top) for top in record.top],
        "text_offset": list(places),
    }


class Response:
    """The response to one request, as a whole or as a stream."""

    end = "data: [DONE]\n\n"  # of a stream

    def __init__(
        self, asked: Asked, jobs: Sequence[Job], loop: DecodeLoop, reader: Reader, model: str
    ):
        self.asked, self.jobs, self.loop = asked, jobs, loop
        self.inbox, self.is_chat = jobs[0].inbox, isinstance(asked, ChatRequest)
        self.choices = [
            Choice(
                job,
                reader,
                asked,
                ToolCalls() if asked.calls_tools else None,
                None if job.thinks is False else Thoughts(bool(job.thinks)),
            )
            for job in jobs
        ]
        kind = "chat.completion" if self.is_chat else "text_completion"
        id = asked.request_id or secrets.token_hex(12)
        self.head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{id}",
            "object": f"{kind}.chunk" if self.is_chat and asked.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def submit(self) -> None:
        """Queue the answers; raises ApiError 429 when too many wait."""
        if self.asked.wanted != 0:
            self.loop.submit(self.jobs)

    async def whole(self) -> dict[str, Any]:
        """The JSON of all answers."""
        async for _ in self._chunks():
            pass
        choices = [choice.whole() for choice in self.choices]
        more = self.choices[0].prompt_ids if self.is_chat else {}
        return {**self.head, "choices": choices, "usage": self.usage(), **more, **self.drafts()}

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events; the last one ends the answer, or tells of an error."""
        try:
            async for event in self._events():
                yield self._written(event)
            yield self.end
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("a stream failed")
                error = ApiError(500, "the server failed")
            yield self._written(error_body(error))

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        """Chunks as they come, and what was used."""
        firsts = {choice.job.choice: choice.prompt_ids for choice in self.choices}
        if self.is_chat:
            for number, ids in firsts.items():
                delta = {"role": "assistant", "content": ""}
                head = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
                yield self._chunk([head], **(ids if number == 0 else {}))
            firsts.clear()
        async for chunk in self._chunks():
            yield self._chunk([chunk | firsts.pop(chunk["index"], {})])
        if (self.asked.stream_options or {}).get("include_usage"):
            yield self._chunk([], usage=self.usage(), **self.drafts())

    def _chunk(self, choices: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
        wanted = self.asked.stream_options or {}
        now = self.usage() if wanted.get("continuous_usage_stats") else None
        usage = {"usage": now} if now or wanted.get("include_usage") else {}
        return {**self.head, "choices": choices, **usage, **others}

    def _written(self, event: dict[str, Any]) -> str:
        """An event as it is sent."""
        return f"data: {json.dumps(event)}\n\n"

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        """A choice of a chunk for each piece of an answer; all answers are given up at an error."""
        open_choices = {choice.job.id: choice for choice in self.choices}
        try:
            if self.asked.echo:
                for choice in self.choices:
                    yield await self._echo(choice)
            if self.asked.wanted == 0:
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
            record = await self.loop.score(choice.job, top)
        reason = None if self.asked.wanted else "length"
        return await asyncio.to_thread(choice.echo, prompt, record, reason)

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
        """Describe what was read, written and drafted, for people."""
        usage, found = self.usage(), speculation([job.metrics for job in self.jobs])
        drafted = f"{found['num_accepted_draft_tokens']} of {found['num_draft_tokens']} drafts"
        return f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens, {drafted}"

    def drafts(self) -> dict[str, Any]:
        """Return statistics of the drafts, where there were any."""
        found = speculation([job.metrics for job in self.jobs])
        return {"metrics": {"speculative_decoding": found}} if found["num_spec_steps"] else {}
