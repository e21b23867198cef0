"""OpenAI's Responses: items instead of messages, which become a chat and are made of its answer.

Nothing of a response is stored, so a conversation goes on by sending its items again.
"""

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from drafthead.infer.verifiers.base import options_of_rule
from drafthead.serve.errors import ApiError, error_body, not_supported
from drafthead.serve.protocol import ANY, Body, ChatRequest, Neutral
from drafthead.serve.responses import Response, logger

NEUTRAL_IN_RESPONSES: Neutral = {
    **dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key"), ANY),
    "prompt_cache_retention": ANY,
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    "background": (False,),
    "include": ([],),
    "top_logprobs": (0,),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
}
# Of a request for an answer, which say the same here.
SHARED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *(
        "chat_template_kwargs",
        "cache_salt",
        "draft",
        "store",
        "verifier",
        "stream",
        "parallel_tool_calls",
    ),
)
PARTS = ("input_text", "output_text", "text", "reasoning_text")
NAMED = ("id", "status", "summary", "encrypted_content", "annotations", "logprobs", "phase")


class FunctionTool(TypedDict, total=False):
    """A function that an answer may call, as Responses have them."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class TextFormat(TypedDict, total=False):
    """The form of a text, as Responses have it."""

    type: Literal["text", "json_object", "json_schema"]
    name: Any
    description: Any
    schema: dict[str, Any] | None
    strict: Any


class TextOptions(TypedDict, total=False):
    """How a text is written."""

    format: TextFormat | None
    verbosity: Literal["medium"] | None


class StreamObfuscation(TypedDict, total=False):
    """How a stream is sent, which changes no text."""

    include_obfuscation: Any


class ResponsesRequest(Body):
    """A request for the next items of a conversation."""

    neutral: ClassVar[Neutral] = NEUTRAL_IN_RESPONSES
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)  # `chat` looks at the others

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextOptions | None = None
    stream_options: StreamObfuscation | None = None
    previous_response_id: str | None = None

    def chat(self) -> ChatRequest:
        """The chat that a response is made of; raises ApiError 400 for what it has no place for."""
        if self.previous_response_id is not None:
            name = "previous_response_id"
            raise ApiError(400, f"{name}: responses are not stored here, send their items", name)
        others = self.model_extra or {}
        known = {*SHARED, *options_of_rule(str(others.get("verifier")), ())} - {"rule_options"}
        if unknown := [name for name in others if name not in known]:
            raise not_supported(unknown[0])
        begin = [{"role": "system", "content": self.instructions}] if self.instructions else []
        said = [{"role": "user", "content": self.input}]
        items = self.input if isinstance(self.input, list) else said
        given = {
            "model": self.model,
            "messages": [*begin, *messages_of(items)],
            "max_completion_tokens": self.max_output_tokens,
            "tools": [nested(tool) for tool in self.tools or ()],
            "tool_choice": nested(self.tool_choice),
            "response_format": self._format(),
        }
        try:
            return ChatRequest.model_validate({**others, **given})
        except ValidationError as error:
            found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            raise RequestValidationError(found) from error

    def _format(self) -> dict[str, Any] | None:
        """The form of a text as chats have it."""
        form = (self.text or {}).get("format")
        if form is None or form.get("type") != "json_schema":
            return None if form is None else {"type": form["type"]}
        return {
            "type": "json_schema",
            "json_schema": {n: v for n, v in form.items() if n != "type"},
        }


def nested(given: Any) -> Any:
    """A function as chats have it: within an object of its own."""
    if not isinstance(given, dict) or given.get("type") != "function":
        return given
    return {"type": "function", "function": {n: v for n, v in given.items() if n != "type"}}


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as the messages of a chat: calls and thoughts belong to the answer that they are of.

    Raises ApiError 400 for an item, or a field of one, that no message has.
    """
    found: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        kind = item.get("type", "message")
        rest = {n: v for n, v in item.items() if n not in (*NAMED, "type") and v is not None}
        where = f"input.{place}"
        answer = found[-1] if found and found[-1]["role"] == "assistant" else None
        if kind == "message" and isinstance(rest.get("role"), str):
            role, content = rest.pop("role"), text_of(rest.pop("content", ""), where)
            role = "system" if role == "developer" else role
            is_open = role == "assistant" and answer is not None and "content" not in answer
            message = answer if is_open and answer is not None else {"role": role}
            message["content"] = content
            found += [] if is_open else [message]
        elif kind == "function_call_output":
            call, output = rest.pop("call_id", None), text_of(rest.pop("output", ""), where)
            found.append({"role": "tool", "tool_call_id": call, "content": output})
        elif kind in ("function_call", "reasoning"):
            if answer is None or (kind == "reasoning" and len(answer) > 1):
                answer = {"role": "assistant"}
                found.append(answer)
            if kind == "reasoning":
                answer["reasoning_content"] = text_of(rest.pop("content", ""), where)
            else:
                function = {"name": rest.pop("name", None), "arguments": rest.pop("arguments", "")}
                call = {"id": rest.pop("call_id", None), "type": "function", "function": function}
                answer["tool_calls"] = [*answer.get("tool_calls", ()), call]
        else:
            raise ApiError(400, f"{where}: items of type {kind!r} are not supported", where)
        if rest:
            raise not_supported(f"{where}.{min(rest)}")
    return found


def text_of(content: Any, where: str) -> str:
    """The text of an item's content; raises ApiError 400 where it is more than text."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        is_text = isinstance(part, dict) and part.get("type", "text") in PARTS
        if not (is_text and isinstance(part.get("text"), str)):
            raise ApiError(400, f"{where}.content: only texts are read", f"{where}.content")
        if unknown := part.keys() - {"type", "text", *NAMED}:
            raise not_supported(f"{where}.content.{min(unknown)}")
        texts.append(part["text"])
    return "".join(texts)


class Items:
    """The items of an answer while its pieces come, and the events that tell of them."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None  # an item of text or of thoughts

    def add(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a piece of the answer."""
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            if text := delta.get(name):
                yield from self._text(kind, text)
        for call in delta.get("tool_calls", ()):
            yield from self.end()
            yield from self._call(call)

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self.open is None or self.open["type"] != kind:
            yield from self.end()
            self.open = new_item(kind)
            yield self._event("response.output_item.added", item={**self.open, "content": []})
            part = {**self.open["content"][0]}
            yield self._event("response.content_part.added", self.open, part=part)
        part = self.open["content"][0]
        part["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{part['type']}.delta", self.open, delta=text, **more)

    def _call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        function, id = call["function"], f"fc_{secrets.token_hex(12)}"
        head = {"id": id, "type": "function_call", "call_id": call["id"], "name": function["name"]}
        begun = {**head, "arguments": "", "status": "in_progress"}
        item = {**head, "arguments": function["arguments"], "status": "completed"}
        yield self._event("response.output_item.added", item=begun)
        of, event = {"item_id": id, "output_index": len(self.done)}, "function_call_arguments"
        yield {"type": f"response.{event}.delta", **of, "delta": function["arguments"]}
        whole = {"name": function["name"], "arguments": function["arguments"]}
        yield {"type": f"response.{event}.done", **of, **whole}
        yield self._event("response.output_item.done", item=item)
        self.done.append(item)

    def end(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """The events of the end of the item that is open, if one is."""
        item, self.open = self.open, None
        if item is None:
            return
        part, item["status"] = item["content"][0], status
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        yield self._event(f"response.{part['type']}.done", item, text=part["text"], **more)
        yield self._event("response.content_part.done", item, part=part)
        yield self._event("response.output_item.done", item=item)
        self.done.append(item)

    def _event(self, kind: str, of: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """An event of the item that comes after those that are done, or of its only part."""
        place = {} if of is None else {"item_id": of["id"], "content_index": 0}
        return {"type": kind, "output_index": len(self.done), **place, **more}


def new_item(kind: str) -> dict[str, Any]:
    """An item without a text, of kind `message` or `reasoning`."""
    id, is_text = secrets.token_hex(12), kind == "message"
    part: dict[str, Any] = {"type": "output_text" if is_text else "reasoning_text", "text": ""}
    part |= {"annotations": [], "logprobs": []} if is_text else {}
    own: dict[str, Any] = {"role": "assistant"} if is_text else {"summary": []}
    head = {"id": f"{'msg' if is_text else 'rs'}_{id}", "type": kind, **own}
    return {**head, "content": [part], "status": "in_progress"}


class ItemsResponse(Response):
    """The response to one request for items, as a whole or as a stream."""

    def __init__(self, request: ResponsesRequest, *made: Any):
        """Answers a request with what `Response` takes for the chat that was made of it."""
        super().__init__(*made)
        self.request, self.items = request, Items()
        self.head["id"] = f"resp_{secrets.token_hex(12)}"

    async def whole(self) -> dict[str, Any]:
        """The JSON of the response."""
        async for _ in self._events():
            pass
        return self._response()

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events; the last one has the whole response, or tells of an error."""
        number = 0
        try:
            async for event in self._events():
                yield written(event, number)
                number += 1
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("a stream failed")
                error = ApiError(500, "the server failed")
            told = dict(error_body(error.status_code, error.detail, error.param)["error"])  # type: ignore[call-overload]
            yield written({**told, "type": "error", "code": told["type"]}, number)

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response("in_progress")}
        async for chunk in self._chunks():
            for event in self.items.add(chunk["delta"]):
                yield event
        status = self._status
        for event in self.items.end(status):
            yield event
        yield {"type": f"response.{status}", "response": self._response()}

    @property
    def _status(self) -> str:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    def _response(self, status: str | None = None) -> dict[str, Any]:
        """The response as it is; `status` of one that has not ended."""
        asked, chat, now = self.request, self.asked, status or self._status
        assert isinstance(chat, ChatRequest)
        cut = {"reason": "max_output_tokens"} if now == "incomplete" else None
        form = (asked.text or {}).get("format") or {"type": "text"}
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "status": now,
            "error": None,
            "incomplete_details": cut,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "model": self.head["model"],
            "output": self.items.done,
            "parallel_tool_calls": chat.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if chat.temperature is None else chat.temperature,
            "text": {"format": form},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in asked.tools or ()],
            "top_p": 1.0 if chat.top_p is None else chat.top_p,
            "truncation": "disabled",
            "usage": None if status else self._usage(),
            **({} if status else self.drafts()),
        }

    def _usage(self) -> dict[str, Any]:
        """The tokens that were read and written, of these those of thoughts."""
        usage, [choice] = self.usage(), self.choices
        end = 0 if choice.thoughts is None else choice.thoughts.end
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": sum(place < end for place in choice.job.text.places)
            },
            "total_tokens": usage["total_tokens"],
        }


def written(event: dict[str, Any], number: int) -> str:
    """An event as it is sent, with its number."""
    text = json.dumps({**event, "sequence_number": number})
    return f"event: {event['type']}\ndata: {text}\n\n"
