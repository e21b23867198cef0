"""OpenAI's Responses: items instead of messages, which become a chat and are made of its answer.

Nothing of a response is stored, so a conversation goes on by sending its items again.
"""

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Annotated, Any, ClassVar, Literal, Required

from pydantic import Field
from typing_extensions import TypedDict

from drafthead.core.settings import AtLeastOne
from drafthead.serve.errors import ApiError, not_supported
from drafthead.serve.limits import checked
from drafthead.serve.protocol import (
    ANY,
    KNOWN_IN_PARTS,
    NEUTRAL,
    ChatRequest,
    JsonSchema,
    Listed,
    Neutral,
    Sampled,
)
from drafthead.serve.responses import Response

NEUTRAL_IN_RESPONSES: Neutral = {
    **{name: NEUTRAL[name] for name in ("service_tier", "priority", "prompt_cache_retention")},
    "seed": (-1,),
    "max_tool_calls": ANY,  # of the server's own tools, of which there are none
    "truncation": ("disabled",),
    **dict.fromkeys(("background", "enable_response_messages"), (False,)),
    # The thoughts themselves are in their item, which can be sent back as it is.
    "include": ([], ["reasoning.encrypted_content"]),
    "top_logprobs": (0,),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
}
OF_CHATS = (*Sampled.model_fields, "chat_template_kwargs", "parallel_tool_calls")
TOLD = ("metadata", "user", "safety_identifier", "prompt_cache_key")  # again in the response
PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
NESTED = ("function", "allowed_tools", "json_schema")
NAMED = ("id", "status", "encrypted_content", "annotations", "logprobs", "phase")


class TextFormat(JsonSchema, total=False):
    """The form of a text, as Responses have it."""

    type: Required[Literal["text", "json_object", "json_schema"]]


class TextOptions(TypedDict, total=False):
    """The format and the verbosity of a text."""

    format: TextFormat | None
    verbosity: Literal["medium"] | None


class ResponsesRequest(Sampled):
    """A request for the next items of a conversation."""

    neutral: ClassVar[Neutral] = NEUTRAL_IN_RESPONSES

    input: str | Annotated[Listed[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: AtLeastOne | None = None
    tools: Listed[dict[str, Any]] | None = None  # looked at as those of the chat
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    stream_options: dict[Literal["include_obfuscation"], Any] | None = None  # neutral
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[str, str], Field(default_factory=dict)]
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def chat(self) -> ChatRequest:
        """The chat that a response is made of; raises ApiError 400 for what it has no place for."""
        begin = [{"role": "system", "content": self.instructions}] if self.instructions else []
        said = [{"role": "user", "content": self.input}]
        items = self.input if isinstance(self.input, list) else said
        given = {name: getattr(self, name) for name in self.model_fields_set.intersection(OF_CHATS)}
        given |= given.pop("rule_options", {}) | {
            "messages": [*begin, *messages_of(items)],
            "max_completion_tokens": self.max_output_tokens,
            "tools": [nested(tool) for tool in self.tools or ()],
            "tool_choice": nested(self.tool_choice),
            "response_format": nested((self.text or {}).get("format")),
        }
        return checked(ChatRequest, {"model": self.model, **given})


def nested(given: Any) -> Any:
    """A function, a choice of some or a form as chats have it: within an object of its own."""
    if not isinstance(given, dict) or given.get("type") not in NESTED:
        return given
    inner = {name: value for name, value in given.items() if name != "type"}
    if isinstance(inner.get("tools"), list):
        inner["tools"] = [*map(nested, inner["tools"])]
    return {"type": given["type"], given["type"]: inner}


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as the messages of a chat: calls and thoughts belong to the answer that they are of.

    Raises ApiError 400 for an item, or a field of one, that no message has.
    """
    found: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        where, kind = f"input.{place}", item.get("type", "message")
        rest = {n: v for n, v in item.items() if n not in (*NAMED, "type") and v is not None}
        last = found[-1] if found and found[-1]["role"] == "assistant" else {}
        if kind == "message" and isinstance(rest.get("role"), str):
            role, content = rest.pop("role"), text_of(rest.pop("content", ""), where)
            if role == "assistant" and last and "content" not in last:
                last["content"] = content
            else:
                role = "system" if role == "developer" else role
                found.append({"role": role, "content": content})
        elif kind == "function_call_output":
            named = {"name": rest.pop("name", None), "tool_call_id": rest.pop("call_id", None)}
            output = text_of(rest.pop("output", ""), where)
            found.append({"role": "tool", **named, "content": output})
        elif kind == "reasoning":  # of other models it may have a summary alone, or no text
            texts = [text_of(rest.pop(name, ""), where) for name in ("content", "summary")]
            thought = texts[0] or texts[1]
            if last.keys() == {"role", "reasoning_content"}:
                last["reasoning_content"] += thought
            elif thought:
                found.append({"role": "assistant", "reasoning_content": thought})
        elif kind == "function_call":
            function = {"name": rest.pop("name", None), "arguments": rest.pop("arguments", "")}
            call = {"id": rest.pop("call_id", None), "type": "function", "function": function}
            found += [] if last else [{"role": "assistant"}]
            found[-1]["tool_calls"] = [*found[-1].get("tool_calls", ()), call]
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
        if unknown := part.keys() - {*KNOWN_IN_PARTS, *NAMED}:
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
        of: dict[str, Any] = {"item_id": f"fc_{secrets.token_hex(12)}"}
        said = call["function"]
        item = {"id": of["item_id"], "type": "function_call", "call_id": call["id"], **said}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", item=begun)
        event = "response.function_call_arguments"
        yield self._event(f"{event}.delta", **of, delta=said["arguments"])
        yield self._event(f"{event}.done", **of, **said)
        yield from self._done({**item, "status": "completed"})

    def end(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """The events of the end of the item that is open, if one is."""
        item, self.open = self.open, None
        if item is None:
            return
        part, item["status"] = item["content"][0], status
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        yield self._event(f"response.{part['type']}.done", item, text=part["text"], **more)
        yield self._event("response.content_part.done", item, part=part)
        yield from self._done(item)

    def _done(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
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

    end = ""

    def __init__(self, request: ResponsesRequest, *made: Any):
        """Answers a request with what `Response` takes for the chat that was made of it."""
        super().__init__(*made)
        self.request, self.items, self.numbers = request, Items(), count()
        self.head["id"] = f"resp_{request.request_id or secrets.token_hex(12)}"

    async def whole(self) -> dict[str, Any]:
        """The JSON of the response."""
        async for _ in self._events():
            pass
        return self._response()

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
            **{name: getattr(asked, name) for name in TOLD},
            "model": self.head["model"],
            "output": self.items.done,
            "parallel_tool_calls": chat.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": self.jobs[0].source is not None,
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
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": sum(place < end for place in choice.job.text.places)
            },
            "total_tokens": usage["total_tokens"],
        }

    def _written(self, event: dict[str, Any]) -> str:
        """An event as it is sent, with its number; that of an error has no object around it."""
        if "error" in event:
            error = event["error"]
            event = {**error, "type": "error", "code": error["code"] or error["type"]}
        numbered = {**event, "sequence_number": next(self.numbers)}
        return f"event: {event['type']}\ndata: {json.dumps(numbered)}\n\n"
