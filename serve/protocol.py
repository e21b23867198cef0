"""What clients send: fields of OpenAI's requests, read as requests of the engine."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor

from drafthead.infer import Decoder
from drafthead.infer.request.options import DecodeOptions, read_options
from drafthead.infer.request.prompts import encode
from drafthead.serve.answer_text import AnswerText
from drafthead.serve.decode_loop import Inbox, Job
from drafthead.serve.errors import ApiError
from drafthead.serve.json_grammar import JsonGrammars
from drafthead.serve.metrics import AnswerMetrics, Metrics

MOST_CHOICES = 128
COMPLETION_TOKENS = 16  # of a completion that names no number
# Fields that would change an answer and are not honoured, with the values that change nothing. What
# is neither read nor here is passed over.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("audio", "functions", "function_call", "prompt_embeds", "reasoning_effort"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar"),
            *("structured_outputs", "json_schema", "allowed_token_ids", "bad_words", "typical_p"),
            *("truncate_prompt_tokens", "prompt_logprobs", "thinking_token_budget", "reasoning"),
        ),
        (),
    ),
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (True, False),
}


class StreamOptions(BaseModel):
    """How a stream ends."""

    include_usage: bool = False


class Answering(BaseModel):
    """Fields of both kinds of request."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: Annotated[int | None, Field(ge=1, le=MOST_CHOICES)] = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_drafted: bool = False  # our own: which parts of a stream's text were drafted

    def refuse_unread(self) -> None:
        """Raise ApiError 400 for a field that would change the answer and is not honoured."""
        for name, value in (self.model_extra or {}).items():
            if name in REFUSED and value is not None and value not in REFUSED[name]:
                raise ApiError(400, f"{name} is not supported by this server: leave it out", name)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    @property
    def top(self) -> int | None:
        """How many alternatives to each token are wanted; None for no log-probabilities."""
        raise NotImplementedError

    def options(self, max_tokens: int, processors: Sequence[LogitsProcessor]) -> DecodeOptions:
        """The options of the engine, but for the seed.

        Raises ApiError 400 for what transformers refuses.
        """
        settings: dict[str, Any] = {
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "min_new_tokens": self.min_tokens,
            "min_p": None if self.greedy else self.min_p,
            "sequence_bias": [[[t], b] for t, b in (self.logit_bias or {}).items()] or None,
        }
        given = {name: value for name, value in settings.items() if value is not None}
        try:
            config = GenerationConfig(do_sample=not self.greedy, **given)
        except ValueError as error:
            raise ApiError(400, str(error).splitlines()[0]) from error
        return {
            "max_new_tokens": max_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": None if self.greedy or not self.top_k else max(0, self.top_k),
            "top_p": None if self.greedy else self.top_p,
            "logprobs": self.top,
            "generation_config": config,
            "logits_processor": processors,
        }


class ChatRequest(Answering):
    """A request for the next message of a conversation."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def top(self) -> int | None:
        """How many alternatives to each token are wanted; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call tools; raises ApiError 400 where it would have to."""
        if self.tool_choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice can be none or auto here", "tool_choice")
        return bool(self.tools) and self.tool_choice != "none"

    def prompts(self, decoder: Decoder) -> list[list[int]]:
        """The conversation as token ids."""
        arguments = {**(self.chat_template_kwargs or {})}
        if self.calls_tools:
            arguments["tools"] = self.tools
        return encode(
            [message_for_template(each) for each in self.messages],
            decoder.tokenizer,
            template_arguments=arguments,
            continue_final_message=self.continue_final_message,
        )


class CompletionRequest(Answering):
    """A request for what follows one text or several."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool = False

    @property
    def top(self) -> int | None:
        """How many alternatives to each token are wanted; None for no log-probabilities."""
        return self.logprobs

    def prompts(self, decoder: Decoder) -> list[list[int]]:
        """Each text as token ids; raises ApiError 400 for an empty one."""
        given = self.prompt
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        return [token_ids(each, decoder) for each in (given if several else [given])]


class TextRequest(BaseModel):
    """A text or a conversation to be made into tokens."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class TokensRequest(BaseModel):
    """Tokens to be made into a text."""

    tokens: list[int]


def token_ids(text: Any, decoder: Decoder) -> list[int]:
    """A text, or token ids as they are; raises ApiError 400 for an empty one."""
    assert decoder.tokenizer is not None
    ids = list(decoder.tokenizer(text)["input_ids"]) if isinstance(text, str) else list(text)
    if not ids:
        raise ApiError(400, "the prompt is empty: it needs at least one token", "prompt")
    return ids


def message_for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a text, and whose calls have arguments that are no text.

    Raises ApiError 400 for calls that are none.
    """
    found = {**message, "content": message.get("content") or ""}
    try:
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [{**call, "function": called(call["function"])} for call in calls]
    except (KeyError, TypeError, ValueError) as error:
        raise ApiError(
            400, "tool_calls have a function with a name, and arguments that are JSON", "messages"
        ) from error
    return found


def called(function: dict[str, Any]) -> dict[str, Any]:
    """The function of a call, whose arguments clients send as JSON in a text."""
    arguments = function["arguments"]
    return {
        **function,
        "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments,
    }


@dataclass(frozen=True)
class Reader:
    """Reads requests for one decoder."""

    decoder: Decoder
    metrics: Metrics
    max_length: int  # tokens of a prompt and its answer
    grammars: JsonGrammars

    def jobs(self, asked: ChatRequest | CompletionRequest, inbox: Inbox) -> list[Job]:
        """The answers that a request asks for.

        Raises ApiError 400 and UserError for what cannot be honoured.
        """
        asked.refuse_unread()
        vocab_size = self.decoder.target.vocab_size
        if unknown := [t for t in asked.logit_bias or () if not 0 <= t < vocab_size]:
            raise ApiError(
                400, f"token {unknown[0]} is not one of the {vocab_size} tokens", "logit_bias"
            )
        prompts = asked.prompts(self.decoder)
        if len(prompts) * asked.choices > MOST_CHOICES:
            raise ApiError(400, f"a request may have {MOST_CHOICES} answers at most", "n")
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        stops = [asked.stop] if isinstance(asked.stop, str) else (asked.stop or [])
        assert self.decoder.tokenizer is not None
        jobs: list[Job] = []
        for number, ids in enumerate(prompts):
            limit = self.limit(asked, len(ids))
            for _ in range(asked.choices):
                options = asked.options(max(1, limit), self.masks(asked, len(ids)))
                settings = read_options({**options, "seed": seed + len(jobs)})
                request = self.decoder.request(ids, settings)
                text = AnswerText(
                    self.decoder.tokenizer,
                    [stop for stop in stops if stop],
                    frozenset(asked.stop_token_ids or ()),
                    asked.skip_special_tokens,
                )
                ends = frozenset[int]() if asked.ignore_eos else request.end_ids
                request = replace(request, stops=[text], end_ids=ends)
                metrics, choice = AnswerMetrics(self.metrics), len(jobs)
                jobs.append(Job(request, inbox, text, metrics, choice, number))
        return jobs

    def masks(
        self, asked: ChatRequest | CompletionRequest, prompt_length: int
    ) -> list[LogitsProcessor]:
        """What keeps an answer in the form that is asked for; raises ApiError 400 for no form."""
        if asked.response_format is None:
            return []
        if asked.ignore_eos:
            raise ApiError(400, "ignore_eos does not go with response_format", "ignore_eos")
        mask = self.grammars.mask(asked.response_format, prompt_length)
        return [] if mask is None else [mask]

    def limit(self, asked: ChatRequest | CompletionRequest, length: int) -> int:
        """Most new tokens after a prompt of this length; raises ApiError 400 for a long one."""
        room = self.max_length - length
        limit = asked.max_tokens
        if isinstance(asked, ChatRequest):
            limit = asked.max_completion_tokens or limit
        if limit is None:
            limit = max(1, room) if isinstance(asked, ChatRequest) else COMPLETION_TOKENS
        if limit == 0 and not (isinstance(asked, CompletionRequest) and asked.echo):
            raise ApiError(400, "max_tokens must be at least 1, or 0 with echo", "max_tokens")
        if limit > room:
            raise ApiError(
                400,
                f"a prompt and its answer have at most {self.max_length} tokens here, but the "
                f"prompt has {length} and the answer may have {limit}: shorten one of them",
                "max_tokens",
            )
        return limit
