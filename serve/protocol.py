"""Requests of clients: fields of OpenAI's requests, read as requests of the engine."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Required, Self, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator, with_config
from transformers.generation.configuration_utils import GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from typing_extensions import TypedDict

from drafthead.core import settings
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.chat_template import names_role, reads
from drafthead.infer import Decoder
from drafthead.infer.request.generation_config import Processors
from drafthead.infer.request.messages import OF_TOOLS
from drafthead.infer.request.options import read_options
from drafthead.infer.request.prompts import encode
from drafthead.infer.request.request import Request
from drafthead.infer.verifiers.base import FOLLOWING, options_of_rule
from drafthead.serve.answer_text import CALL, END_OF_CALL, END_OF_THOUGHT, THOUGHT, AnswerText
from drafthead.serve.decode_loop import Inbox, Job
from drafthead.serve.errors import ApiError, beyond_context, not_supported
from drafthead.serve.json_grammar import (
    Form,
    GrammarMask,
    JsonGrammars,
    of_objects,
    schema_grammar,
    text_grammar,
)
from drafthead.serve.limits import MOST_CHOICES
from drafthead.serve.metrics import AnswerMetrics, Metrics
from drafthead.serve.recording import Source

LAST = 16  # tokens of a prompt, among which a mark of thoughts ends it
COMPLETION_TOKENS = 16  # of a completion that names no number
ANY = None  # every value of a field that changes no text
Neutral: TypeAlias = dict[str, tuple[Any, ...] | None]
# Fields that are not read, with the values that change no answer. Every other value, and every
# field that is neither here nor read, is refused.
NEUTRAL: Neutral = {
    name: values
    for names, values in (
        (("user", "metadata", "safety_identifier", "prompt_cache_key"), ANY),
        (("prompt_cache_retention", "prediction", "cache_prompt"), ANY),
        (("best_of", "num_beams", "length_penalty", "typical_p", "repeat_penalty"), (1,)),
        (("no_repeat_ngram_size", "mirostat", "dry_multiplier", "n_probs"), (0,)),
        (("xtc_probability", "priority", "routed_experts_prompt_start"), (0,)),
        (("use_beam_search", "early_stopping", "return_tokens_as_token_ids"), (False,)),
        (("include_stop_str_in_output", "return_prompt_text", "return_token_offsets"), (False,)),
        (("spaces_between_special_tokens", "include_reasoning"), (True,)),
        (("service_tier",), ("auto", "default")),
        (("modalities",), (["text"],)),
        (("verbosity",), ("medium",)),
        (("bad_words",), ([],)),
        (("suffix",), ("",)),
        (("seed",), (-1,)),
    )
    for name in names
}
NEUTRAL_IN_CHATS = NEUTRAL | {"echo": (False,), "add_special_tokens": (False,)}
# Of messages, which clients send back as they came, and of their parts; templates may read more.
NEUTRAL_IN_MESSAGES = dict.fromkeys(
    ("annotations", "id", "provider_specific_fields", "drafted"), ANY
)
KNOWN_IN_PARTS = {"type", "text", "cache_control", "prompt_cache_breakpoint"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Fields that the engine declares too, under the same names.
PENALTIES = settings.names_of(Processors)
OF_ENGINE = PENALTIES | settings.names_of(SamplingConfig)
Each = TypeVar("Each")
Listed: TypeAlias = Annotated[list[Each], Field(fail_fast=True)]  # up to what is wrong


class Fields(BaseModel):
    """A JSON object: each field is read, or known to change no answer, or refused; null is none."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def without_neutral(cls, given: Any) -> Any:
        """The fields that are left to be read."""
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None
            and (name not in cls.neutral or value not in (cls.neutral[name] or (value,)))
        }


class Body(Fields):
    """The JSON of a request."""

    model: str | None = None


class Function(TypedDict, total=False):
    """A function that an answer may call."""

    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None  # the template may show it


class Tool(TypedDict):
    """A tool that an answer may call."""

    type: Literal["function"]
    function: Function


@with_config(ConfigDict(extra="forbid"))
class CalledFunction(TypedDict, total=False):
    """The function of a call, whose arguments clients send as JSON in a text."""

    name: Required[str]
    arguments: Any


@with_config(ConfigDict(extra="forbid"))
class Call(TypedDict, total=False):
    """A call of a tool in an earlier answer."""

    id: str | None
    type: Literal["function"]
    function: Required[CalledFunction]
    index: Any


class StreamOptions(TypedDict, total=False):
    """Options of a stream: tokens used are told beside its text, at the end or in every chunk."""

    include_usage: bool | None
    include_obfuscation: Any
    continuous_usage_stats: bool | None


class JsonSchema(TypedDict, total=False):
    """A form; it is kept to whether it is `strict` or not."""

    schema: dict[str, Any] | None
    name: Any
    description: Any
    strict: Any


class ResponseFormat(TypedDict, total=False):
    """The form of an answer."""

    type: Required[str]
    json_schema: JsonSchema | None
    schema: dict[str, Any] | None


class StructuredOutputs(TypedDict, total=False):
    """The form of an answer, as vLLM names them: one of these."""

    json: dict[str, Any] | str | None
    regex: str | None
    choice: Annotated[Listed[str], Field(min_length=1)] | None
    grammar: str | None
    json_object: bool | None
    disable_any_whitespace: Any  # there is none in any form


def schema_of(form: ResponseFormat) -> dict[str, Any] | None:
    """The JSON schema of a form; None for a text. Raises ApiError 400 for another form."""
    kind, own, named = form["type"], form.get("schema"), form.get("json_schema")
    inner = named.get("schema") if named else None
    if kind == "text" and own is named is None:
        return None
    if kind == "json_object" and named is None:
        return of_objects(own or {}, "response_format")
    if kind == "json_schema" and inner is not None and own is None:
        return inner
    sentence = "response_format is text, json_object, or json_schema with a schema"
    raise ApiError(400, sentence, "response_format")


class Message(Fields):
    """A message of a conversation; a template may read fields of its own."""

    model_config = ConfigDict(extra="allow")
    neutral: ClassVar[Neutral] = NEUTRAL_IN_MESSAGES

    role: str
    content: str | Listed[Any] | None = None
    name: str | None = None
    tool_calls: Listed[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def with_both_names(self) -> Self:
        """The message with its thoughts under both names that templates read."""
        self.reasoning = self.reasoning_content = self.reasoning_content or self.reasoning
        return self

    @property
    def of_templates(self) -> list[str]:
        """The names of fields that only some templates read."""
        # The call that a result belongs to names the function too.
        named = ["name"] if self.name is not None and self.role not in OF_TOOLS else []
        return [*named, *(self.model_extra or ())]

    def refuse_unread(self, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
        """Raise ApiError 400 for a role, or a field of it or of its parts, that nobody knows."""
        if self.role not in ROLES and not names_role(tokenizer, self.role):
            sentence = f"{where}.role is one of {', '.join(ROLES)}, and not {self.role}"
            raise ApiError(400, sentence, f"{where}.role")
        parts = self.content if isinstance(self.content, list) else []
        is_text = all(isinstance(each, dict) and "text" in each for each in parts)
        inner = {name for each in parts for name in each} - KNOWN_IN_PARTS if is_text else set()
        own = [name for name in self.of_templates if not reads(tokenizer, name)]
        if unread := [*own, *sorted(inner)]:
            raise not_supported(f"{where}.{unread[0]}")


class Conversation(Body):
    """Fields of messages and of how they are rendered."""

    messages: Annotated[Listed[Message] | None, Field(min_length=1)] = None
    tools: Listed[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def choice(self) -> tuple[str, list[Tool]]:
        """Whether the answer may or has to call tools, and which of them.

        Raises ApiError 400 for a choice that is none, or that names others than the tools.
        """
        given, tools, mode = self.tool_choice, self.tools or [], self.tool_choice or "auto"
        if isinstance(given, dict):  # it names one, or lists some
            some = given.get("allowed_tools", {"mode": "required", "tools": [given]})
            some = some if isinstance(some, dict) else {}
            named = some["tools"] if isinstance(some.get("tools"), list) else []
            tools = [tool for tool in tools if choice_of(tool) in named]
            mode = some.get("mode", "") if 0 < len(tools) == len(named) else ""
        if mode not in ("none", "auto", "required") or (mode == "required" and not tools):
            sentence = "tool_choice is none, auto, required or the name of one of the tools, as"
            example = '{"type": "function", "function": {"name": "it"}}, or allowed_tools by name'
            raise ApiError(400, f"{sentence} {example}", "tool_choice")
        return str(mode), tools

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call tools."""
        mode, tools = self.choice
        return mode != "none" and bool(tools)

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The arguments of the chat template beside messages."""
        tools = {"tools": self.choice[1]} if self.calls_tools else {}
        return {**(self.chat_template_kwargs or {}), **tools}

    def prompts(self, decoder: Decoder) -> list[list[int]]:
        """The conversation as token ids; raises ApiError 400 for what nobody reads."""
        tokenizer, messages = decoder.tokenizer, self.messages or []
        assert tokenizer is not None
        if not tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions")
        if self.add_generation_prompt is self.continue_final_message:
            name = "add_generation_prompt"
            raise ApiError(400, f"{name} has to be the opposite of continue_final_message", name)
        for place, message in enumerate(messages):
            message.refuse_unread(tokenizer, f"messages.{place}")

        def encoded(without: str = "") -> list[list[int]]:
            """The token ids, without a field that only some templates read."""
            given = [
                each.model_dump(exclude_none=True, exclude={without} & {*each.of_templates})
                for each in messages
            ]
            goes_on, arguments = self.continue_final_message, self.template_arguments
            return encode(
                given, tokenizer, template_arguments=arguments, continue_final_message=goes_on
            )

        ids = encoded()
        others = {name: place for place, each in enumerate(messages) for name in each.of_templates}
        for name, place in others.items():  # which the template names, perhaps for something else
            if encoded(name) == ids:
                raise not_supported(f"messages.{place}.{name}")
        return ids


def choice_of(tool: Tool) -> dict[str, Any]:
    """The `tool_choice` that names a tool."""
    return {"type": "function", "function": {"name": tool["function"]["name"]}}


class Sampled(Body):
    """Fields of all requests for answers: the engine's as it declares them, then our own."""

    neutral: ClassVar[Neutral] = NEUTRAL

    temperature: settings.Temperature | None = None
    top_p: settings.TopP | None = None
    top_k: Annotated[
        settings.TopK | None, BeforeValidator(lambda given: 0 if given == -1 else given)
    ] = None
    min_p: settings.MinP | None = None
    repetition_penalty: settings.RepetitionPenalty | None = None
    presence_penalty: settings.CountPenalty | None = None
    frequency_penalty: settings.CountPenalty | None = None
    seed: settings.Integer | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    min_tokens: settings.NotNegative = 0  # before which nothing ends an answer
    ignore_eos: bool = False
    logit_bias: dict[int, Annotated[settings.Number, Field(ge=-100, le=100)]] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Listed[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    stream: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""  # what was read for a request is reused for the same salt alone
    prompt_cache_options: dict[Literal["mode", "ttl"], Any] | None = None  # changes no answer
    request_id: str | None = None  # of which the answer's own is made
    store: bool | None = None  # False: not to be recorded
    draft: settings.Flag | Listed[str] = True  # all of the server's drafters, none or some
    verifier: str = "auto"  # the acceptance rule, whose options are fields too
    rule_options: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def with_rule_options(cls, given: Any) -> Any:
        """The request with the options of its rule gathered; ApiError 400 where they are already.

        Fields of requests are no options of a rule, whatever that calls its own.
        """
        if not isinstance(given, dict):
            return given
        if "rule_options" in given:
            raise not_supported("rule_options")
        own = options_of_rule(str(given.get("verifier")), ()) - cls.model_fields.keys()
        others = {name: value for name, value in given.items() if name not in own}
        return others | {"rule_options": {name: given[name] for name in own & given.keys()}}


class Answering(Sampled):
    """Fields of chats and of completions."""

    max_tokens: settings.NotNegative | None = None
    n: Annotated[settings.AtLeastOne, Field(le=MOST_CHOICES)] = 1  # answers to each prompt
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_drafted: bool = False  # which parts of a stream's text were drafted

    @model_validator(mode="after")
    def refuse_without_effect(self) -> Self:
        """Raise ApiError 400 for a field that needs another one."""
        for name, other in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
            if getattr(self, name, None) and not getattr(self, other):
                raise ApiError(400, f"{name} need {other}: true", name)
        return self

    @property
    def given_forms(self) -> dict[str, tuple[str, Any]]:
        """By field: the kind of a form that is asked for, and what it is."""
        kinds, named = ("json", "regex", "choice", "grammar"), self.structured_outputs or {}
        found = {f"guided_{kind}": (kind, getattr(self, f"guided_{kind}")) for kind in kinds}
        found |= {f"structured_outputs.{kind}": (kind, named.get(kind)) for kind in kinds}
        if named.get("json_object"):
            found["structured_outputs.json_object"] = "json", {"type": "object"}
        schema = schema_of(self.response_format) if self.response_format else None
        found["response_format"] = "json", schema
        return {field: pair for field, pair in found.items() if pair[1] is not None}

    @property
    def has_form(self) -> bool:
        """Whether the answer is kept in a form, which may take long to compile."""
        return bool(self.given_forms)

    def form(self, thinks: bool | None) -> Form | None:
        """Return the form of the answer; None where it is free. `thinks` is as for `Form`.

        Raises ApiError 400 for two forms, and for what is none.
        """
        given = self.given_forms
        if len(given) > 1:
            raise ApiError(400, f"{' and '.join(given)} are two forms of one answer", min(given))
        for name, (kind, value) in given.items():
            is_json = kind == "json"
            text = schema_grammar(value, name) if is_json else text_grammar(kind, value, name)
            return Form(name, text, thinks=thinks)
        return None

    def options(self) -> dict[str, Any]:
        """The options of the engine that are given. At temperature 0 there is nothing to filter."""
        names = type(self).model_fields.keys() & (PENALTIES if self.temperature == 0 else OF_ENGINE)
        given = {name: getattr(self, name) for name in names}
        return {
            **{name: value for name, value in given.items() if value is not None},
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "sequence_bias": [[[t], b] for t, b in (self.logit_bias or {}).items()] or None,
            "verifier": self.verifier,
            **self.rule_options,
        }


class ChatRequest(Conversation, Answering):
    """A request for the next message of a conversation."""

    neutral: ClassVar[Neutral] = NEUTRAL_IN_CHATS
    may_think: ClassVar[bool] = True
    echo: ClassVar[bool] = False

    messages: Annotated[Listed[Message], Field(min_length=1)]
    max_completion_tokens: settings.AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[settings.NotNegative | None, Field(le=20)] = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def refuse_open_call(self) -> Self:
        """Raise ApiError 400 for a call that a client began."""
        if self.calls_tools and CALL in self.begun.rpartition(END_OF_CALL)[2]:
            sentence = f"an answer cannot go on within {CALL}: leave the mark out"
            raise ApiError(400, sentence, "continue_final_message")
        return self

    @property
    def begun(self) -> str:
        """The text that the answer goes on with; parts that are no text are refused later."""
        content = (self.messages[-1].content or "") if self.continue_final_message else ""
        if isinstance(content, str):
            return content
        return "".join(str(part.get("text")) for part in content if isinstance(part, dict))

    @property
    def has_form(self) -> bool:
        return super().has_form or self.choice[0] == "required"

    def form(self, thinks: bool | None) -> Form | None:
        (mode, tools), form = self.choice, super().form(thinks)
        functions = [tool["function"] for tool in tools]
        # One that is named is called once.
        several = self.parallel_tool_calls and self.tool_choice not in [*map(choice_of, tools)]
        if mode == "required":  # then there is no text
            return Form("tools", None, functions, several, thinks)
        return form and replace(
            form, functions=functions if mode == "auto" else [], several=several
        )

    @property
    def top(self) -> int | None:
        """The number of alternatives wanted to each token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted(self) -> int | None:
        """Most tokens of the answer; None: as many as there is room for; 0: prompts alone."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Answering):
    """A request for what follows one text or several."""

    calls_tools: ClassVar[bool] = False
    may_think: ClassVar[bool] = False
    begun: ClassVar[str] = ""

    prompt: str | Listed[int] | Listed[str] | Listed[Listed[int]]
    logprobs: Annotated[settings.NotNegative | None, Field(le=20)] = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def texts(self) -> list[Any]:
        """Each prompt as it came: a text or token ids."""
        given = self.prompt
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        return list(given) if several else [given]

    @property
    def top(self) -> int | None:
        """The number of alternatives wanted to each token; None for no log-probabilities."""
        return self.logprobs

    @property
    def wanted(self) -> int:
        """Most tokens of the answer; 0: prompts alone are asked for."""
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self, decoder: Decoder) -> list[list[int]]:
        """Each text as token ids; raises ApiError 400 for an empty one."""
        return [token_ids(each, decoder, self.add_special_tokens) for each in self.texts]


Asked: TypeAlias = ChatRequest | CompletionRequest


class TextRequest(Conversation):
    """A text or a conversation to be made into tokens."""

    neutral: ClassVar[Neutral] = {"return_token_strs": (False,)}

    prompt: str | None = None
    add_special_tokens: bool | None = None

    def prompts(self, decoder: Decoder) -> list[list[int]]:
        """The text or the conversation as token ids; raises ApiError 400 for both."""
        if self.messages is None:
            added = self.add_special_tokens is not False
            return [token_ids(self.prompt or "", decoder, added)]
        if self.prompt is not None or self.add_special_tokens:
            raise ApiError(400, "prompt and add_special_tokens do not go with messages", "messages")
        return super().prompts(decoder)


class DraftsRequest(Body):
    """Choice of what drafts from now on, as `--draft` names it; an empty list: nothing."""

    draft: str | Listed[str]


class TokensRequest(Body):
    """Tokens to be made into a text."""

    tokens: Listed[int]


def token_ids(text: str | list[int], decoder: Decoder, special: bool) -> list[int]:
    """A text, or token ids as they are; raises ApiError 400 for an empty one.

    A text begins and ends with `special` tokens where the tokenizer adds such.
    """
    assert decoder.tokenizer is not None
    ids = text
    if isinstance(text, str):
        ids = decoder.tokenizer(text, add_special_tokens=special)["input_ids"]
    if not ids:
        raise ApiError(400, "the prompt is empty: it needs at least one token", "prompt")
    return list(ids)  # type: ignore[arg-type]


def sampling_of(model: Any) -> dict[str, float]:
    """Read sampling from a model's `generation_config.json`: temperature 0 where it is greedy."""
    config = getattr(model, "generation_config", None)
    names = ("temperature", "top_p", "top_k", "min_p")
    found = {name: getattr(config, name, None) for name in names}
    if getattr(config, "do_sample", None) is False:
        return {"temperature": 0.0}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Reader:
    """Reads requests for one decoder."""

    decoder: Decoder
    metrics: Metrics
    max_length: int  # tokens of a prompt and its answer
    grammars: JsonGrammars
    sampling: Mapping[str, float] = field(default_factory=dict)  # of requests that name none

    def jobs(self, asked: Asked, inbox: Inbox, records: bool = False) -> list[Job]:
        """The answers that a request asks for, each with its source where the server records.

        Raises ApiError 400 and UserError for what cannot be honoured.
        """
        missing = {n: v for n, v in self.sampling.items() if getattr(asked, n) is None}
        asked = asked.model_copy(update=missing)
        self.refuse_unknown(asked.logit_bias or (), "logit_bias")
        self.refuse_unknown(asked.stop_token_ids or (), "stop_token_ids")
        prompts = asked.prompts(self.decoder)
        seed, jobs = secrets.randbits(62) if asked.seed is None else asked.seed, list[Job]()
        for number, prompt in enumerate(prompts):
            self.refuse_unknown(prompt, "prompt")
            begun, source = self.has_begun(asked, prompt), None
            for choice in range(asked.n):
                text = self.text(asked, prompt)
                request = self.request(asked, prompt, begun, seed + len(jobs))
                salt = inbox.salt + asked.cache_salt
                request = replace(request, stops=[text], cache_salt=salt)
                if records and choice == 0:
                    source = self.source(asked, request)
                own = inbox, text, AnswerMetrics(self.metrics), len(jobs), number
                jobs.append(Job(request, *own, thinks=begun, source=source))
        return jobs

    def request(self, asked: Asked, prompt: list[int], begun: bool | None, seed: int) -> Request:
        """The engine's request for one answer, without what stops its text."""
        limit, masks = self.limit(asked, len(prompt)), self.masks(asked, begun, len(prompt))
        ends = self.grammars.ends if masks else self.decoder.end_ids
        options = {**asked.options(), "max_new_tokens": max(1, limit), "seed": seed}
        options |= {"logprobs": asked.top, "logits_processor": masks}
        if asked.min_tokens and not masks:
            never = sorted(ends.union(asked.stop_token_ids or ())) or None
            config = GenerationConfig(eos_token_id=never, min_new_tokens=asked.min_tokens)
            options["generation_config"] = config
        # Where no token is to follow the prompt may fill the context, which the engine refuses.
        read = prompt if limit else prompt[:1]
        return replace(
            self.decoder.request(read, read_options(options)),
            prompts=[prompt],
            end_ids=frozenset[int]() if asked.ignore_eos else ends,
            drafts=self.drafts(asked),
        )

    def text(self, asked: Asked, prompt: Sequence[int]) -> AnswerText:
        """Make the text of an answer: marks are part of it though they may be special."""
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        thinks = asked.may_think and self.is_thinker
        marks = [CALL, END_OF_CALL] if asked.calls_tools else []
        assert self.decoder.tokenizer is not None
        return AnswerText(
            self.decoder.tokenizer,
            self.grammars.bytes_of,
            [stop for stop in stops if stop],
            frozenset(asked.stop_token_ids or ()),
            asked.skip_special_tokens,
            prompt,
            [*marks, *([THOUGHT, END_OF_THOUGHT] if thinks else [])],
            asked.min_tokens,
        )

    def source(self, asked: Asked, request: Request) -> Source | None:
        """Return the source to record an answer with; None where it may not be, see `Recorder`."""
        is_own = self.decoder.rule(request).lossless and not request.processors
        if asked.store is False or asked.min_tokens or not is_own:
            return None
        if isinstance(asked, CompletionRequest):
            text = self.decoder.tokenizer.decode([*request.prompts[0]])  # type: ignore[union-attr]
            return Source([{"role": "user", "content": str(text)}], {})
        messages = [message.model_dump(exclude_none=True) for message in asked.messages]
        goes_on = asked.continue_final_message
        return None if goes_on else Source(messages, asked.template_arguments)

    @cached_property
    def is_thinker(self) -> bool:
        """Whether the model may think first: its template or its tokenizer has the marks."""
        tokenizer = self.decoder.tokenizer
        assert tokenizer is not None
        template = str(tokenizer.chat_template)
        return END_OF_THOUGHT in template or END_OF_THOUGHT in tokenizer.get_added_vocab()

    def has_begun(self, asked: Asked, prompt: Sequence[int]) -> bool | None:
        """Whether a prompt ends within thoughts; None where the answer may begin with some."""
        if not (asked.may_think and self.is_thinker):
            return False
        if said := asked.begun.strip():  # by the client
            return said.startswith(THOUGHT) and END_OF_THOUGHT not in said
        end = self.decoder.tokenizer.decode([*prompt[-LAST:]])  # type: ignore[union-attr]
        begins = str(end).rstrip().endswith(THOUGHT)
        return True if begins else None

    def drafts(self, asked: Asked) -> frozenset[str] | None:
        """Return the drafters that a request may use; None: all that the decoder has.

        Raises ApiError 400 for other names, and beside a rule that cannot draft for rows apart.
        """
        known = [] if self.decoder.drafter is None else [*self.decoder.drafter.names]
        if asked.draft is True or (wanted := frozenset(asked.draft or ())) == {*known} != set():
            return None
        if unknown := sorted(wanted.difference(known)):
            there = f"the drafters are {', '.join(known) or 'none'}"
            raise ApiError(400, f"draft {unknown[0]} is not here: {there}", "draft")
        if asked.verifier not in ("auto", *FOLLOWING):
            rules = f"use auto, {' or '.join(FOLLOWING)}"
            sentence = f"draft cannot be combined with the rule {asked.verifier}: {rules}"
            raise ApiError(400, sentence, "draft")
        return wanted

    def masks(self, asked: Asked, thinks: bool | None, prompt_length: int) -> list[GrammarMask]:
        """Return the masks that keep an answer in its form; raises ApiError 400 for no form."""
        form = asked.form(thinks)
        if form is None:
            return []
        if asked.ignore_eos:
            raise ApiError(400, f"ignore_eos cannot be combined with {form.field}", "ignore_eos")
        stops = asked.stop_token_ids or ()
        return [self.grammars.mask(form, prompt_length, asked.min_tokens, stops)]

    def text_of(self, token: int) -> str:
        """The text of a token by itself, special ones as they are named, else its bytes."""
        own = self.grammars.bytes_of(token)
        try:
            return own.decode()
        except UnicodeDecodeError:  # a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def refuse_unknown(self, tokens: Iterable[int], field: str) -> None:
        """Raise ApiError 400 for a token that the target does not have."""
        size = self.decoder.target.vocab_size
        if unknown := [token for token in tokens if not 0 <= token < size]:
            raise ApiError(400, f"token {unknown[0]} is not one of the {size} tokens", field)

    def limit(self, asked: Asked, length: int) -> int:
        """Most new tokens after a prompt of this length; raises ApiError 400 for a long one."""
        room = self.max_length - length
        limit = max(1, room) if asked.wanted is None else asked.wanted
        if limit == 0 and not asked.echo:
            raise ApiError(400, "max_tokens must be at least 1, or 0 with echo", "max_tokens")
        if limit > room:
            rest = f"but the prompt has {length} and the answer may have {limit}: shorten one"
            raise beyond_context(self.max_length, rest, "max_tokens")
        if asked.min_tokens > limit:
            sentence = f"min_tokens may not be above {limit}, the most tokens of the answer"
            raise ApiError(400, sentence, "min_tokens")
        return limit
