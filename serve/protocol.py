"""What clients send: fields of OpenAI's requests, read as requests of the engine."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, Required, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator, with_config
from transformers.generation.logits_process import LogitsProcessor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from typing_extensions import TypedDict

from drafthead.core.target.chat_template import reads
from drafthead.infer import Decoder
from drafthead.infer.request.options import read_options
from drafthead.infer.request.prompts import encode
from drafthead.infer.request.request import Request
from drafthead.infer.verifiers.base import FOLLOWING, options_of_rule
from drafthead.serve.answer_text import CALL, END_OF_CALL, END_OF_THOUGHT, THOUGHT, AnswerText
from drafthead.serve.decode_loop import Inbox, Job
from drafthead.serve.errors import ApiError, not_supported, whole
from drafthead.serve.json_grammar import Form, JsonGrammars, schema_grammar, text_grammar
from drafthead.serve.metrics import AnswerMetrics, Metrics
from drafthead.serve.recording import Source

MOST_CHOICES = 128
MOST_DEPTH = 64  # objects and lists in each other
LAST = 16  # tokens of a prompt, among which a mark of thoughts ends it
COMPLETION_TOKENS = 16  # of a completion that names no number
ANY = None  # every value of a field that changes no text
Neutral: TypeAlias = dict[str, tuple[Any, ...] | None]
# Fields that are not read, with the values that change no answer. Every other value, and every
# field that is neither here nor read, is refused.
NEUTRAL: Neutral = {
    **dict.fromkeys(
        (
            *("user", "metadata", "safety_identifier", "prompt_cache_key", "priority"),
            *("prompt_cache_retention", "request_id", "prediction", "cache_prompt"),
        ),
        ANY,
    ),
    **dict.fromkeys(
        ("best_of", "num_beams", "length_penalty", "typical_p", "repeat_penalty"), (1,)
    ),
    **dict.fromkeys(("no_repeat_ngram_size", "mirostat", "dry_multiplier", "n_probs"), (0,)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "return_tokens_as_token_ids"), (False,)),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "verbosity": ("medium",),
    "xtc_probability": (0,),
}
NEUTRAL_IN_CHATS = NEUTRAL | {"echo": (False,), "add_special_tokens": (False,)}
# Of messages, which clients send back as they came; templates may read more.
NEUTRAL_IN_MESSAGES = dict.fromkeys(
    ("refusal", "annotations", "id", "provider_specific_fields", "drafted"), ANY
)
LEAST_HEAT = 1e-6  # of a temperature above 0: float32 has no smaller scale for logits
Penalty: TypeAlias = Annotated[float | None, Field(ge=-2, le=2)]


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

    @model_validator(mode="before")
    @classmethod
    def refuse_unreadable(cls, given: Any) -> Any:
        """Raise ApiError 400 for half of a surrogate pair, a number that is not finite, and more
        than `MOST_DEPTH` objects in each other.
        """
        level = [given]
        for _ in range(MOST_DEPTH):
            inner: list[Any] = []
            for each in level:
                if isinstance(each, str) and not each.isascii() and each != whole(each):
                    raise ApiError(400, f"{each[:40]} holds half of a character")
                if isinstance(each, float) and not isfinite(each):
                    raise ApiError(400, "NaN and Infinity are no numbers of JSON")
                if isinstance(each, dict):
                    inner += [*each, *each.values()]
                elif isinstance(each, list):
                    inner += each
            if not (level := inner):
                return given
        raise ApiError(400, f"the body has more than {MOST_DEPTH} objects in each other")


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
    """How a stream ends; of the others none changes a text."""

    include_usage: bool | None
    include_obfuscation: Any
    continuous_usage_stats: Any


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
    choice: Annotated[list[str], Field(min_length=1)] | None
    grammar: str | None
    json_object: bool | None


def schema_of(form: ResponseFormat) -> dict[str, Any] | None:
    """The JSON schema of a form; None for a text. Raises ApiError 400 for another form."""
    kind, own, named = form["type"], form.get("schema"), form.get("json_schema")
    inner = named.get("schema") if named else None
    if kind == "text" and own is named is None:
        return None
    if kind == "json_object" and named is None:
        return own or {"type": "object"}
    if kind == "json_schema" and inner is not None and own is None:
        return inner
    sentence = "response_format is text, json_object, or json_schema with a schema"
    raise ApiError(400, sentence, "response_format")


class Message(Fields):
    """A message of a conversation; a template may read fields of its own."""

    model_config = ConfigDict(extra="allow")
    neutral: ClassVar[Neutral] = NEUTRAL_IN_MESSAGES

    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def unread(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The names of fields, of the message and of its parts, that nobody reads."""
        parts = self.content if isinstance(self.content, list) else []
        known = {"type", "text", "cache_control"}
        inner = [name for each in parts if isinstance(each, dict) for name in each.keys() - known]
        is_text = all(isinstance(each, dict) and "text" in each for each in parts)
        own = [name for name in self.model_extra or () if not reads(tokenizer, name)]
        return [*own, *(inner if is_text else ())]


class Conversation(Body):
    """Fields of messages and of how they are rendered."""

    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> list[Function]:
        """Functions of which the answer has to call one; none where it need not.

        Raises ApiError 400 for a choice that is none, or that names none of the tools.
        """
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return []
        functions = [tool["function"] for tool in self.tools or ()]
        if choice != "required":
            kind = {"type": "function"}
            functions = [
                each for each in functions if {**kind, "function": {"name": each["name"]}} == choice
            ]
        if not functions:
            sentence = "tool_choice is none, auto, required or the name of one of the tools, as"
            example = '{"type": "function", "function": {"name": "it"}}'
            raise ApiError(400, f"{sentence} {example}", "tool_choice")
        return functions

    @property
    def template_arguments(self) -> dict[str, Any]:
        """What the chat template reads beside messages."""
        shows = self.must_call or self.calls_tools
        return {**(self.chat_template_kwargs or {}), **({"tools": self.tools} if shows else {})}

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
            if names := message.unread(tokenizer):
                raise not_supported(f"messages.{place}.{names[0]}")
        return encode(
            [message.model_dump(exclude_none=True) for message in messages],
            tokenizer,
            template_arguments=self.template_arguments,
            continue_final_message=self.continue_final_message,
        )


class Answering(Body):
    """Fields of both kinds of request."""

    neutral: ClassVar[Neutral] = NEUTRAL

    max_tokens: Annotated[int | None, Field(ge=0)] = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: float | None = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31 - 1)] = None
    min_p: float | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1  # answers to each prompt
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    cache_salt: str = ""  # what was read for a request is reused for the same salt alone
    # Our own: what may draft, all of the server's drafters, none or some; which parts of a stream's
    # text were drafted; and the acceptance rule, whose options are fields too.
    store: bool | None = None  # False: not to be recorded
    draft: StrictBool | list[str] = True
    return_drafted: bool = False
    verifier: str = "auto"
    rule_options: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def with_rule_options(cls, given: Any) -> Any:
        """The request with the options of its rule gathered; ApiError 400 where they are already.

        Fields of requests are no options of a rule, whatever that calls its own.
        """
        rule = given.get("verifier") if isinstance(given, dict) else None
        if isinstance(given, dict) and "rule_options" in given:
            raise not_supported("rule_options")
        if not isinstance(rule, str):
            return given
        own = options_of_rule(rule, ()) - cls.model_fields.keys()
        others = {name: value for name, value in given.items() if name not in own}
        return others | {"rule_options": {n: v for n, v in given.items() if n in own}}

    @model_validator(mode="after")
    def refuse_without_effect(self) -> Self:
        """Raise ApiError 400 for a field that needs another one."""
        if self.stream_options and not self.stream:
            raise ApiError(400, "stream_options are for streams", "stream_options")
        if 0 < (1 if self.temperature is None else self.temperature) < LEAST_HEAT:
            raise ApiError(400, f"temperature is 0, or {LEAST_HEAT} and more", "temperature")
        if isinstance(self, ChatRequest) and self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs need logprobs: true", "top_logprobs")
        return self

    @property
    def given_forms(self) -> dict[str, tuple[str, Any]]:
        """By field: the kind of a form that is asked for, and what it is."""
        kinds = ("json", "regex", "choice", "grammar")
        found = {f"guided_{kind}": (kind, getattr(self, f"guided_{kind}")) for kind in kinds}
        for kind, given in (self.structured_outputs or {}).items():
            is_object = kind == "json_object" and given is True
            named = "structured_outputs." + kind
            found[named] = ("json", {"type": "object"}) if is_object else (kind, given or None)
        schema = schema_of(self.response_format) if self.response_format else None
        found["response_format"] = "json", schema
        return {field: pair for field, pair in found.items() if pair[1] is not None}

    @property
    def has_form(self) -> bool:
        """Whether the answer is kept in a form, which may take long to compile."""
        return bool(self.given_forms) or (isinstance(self, ChatRequest) and bool(self.must_call))

    def form(self, thinks: bool | None) -> Form | None:
        """What the answer may be; None where it is free. `thinks` is as for `Form`.

        Raises ApiError 400 for two forms, and for what is none.
        """
        given, text, field = self.given_forms, None, "tool_choice"
        if len(given) > 1:
            raise ApiError(400, f"{' and '.join(given)} are two forms of one answer", min(given))
        functions, several = list[Function](), False
        if isinstance(self, ChatRequest):
            # Where one function is named, it is called once.
            several = self.parallel_tool_calls and not isinstance(self.tool_choice, dict)
            functions = self.must_call
        if not functions:  # else there is no text
            for field, (kind, value) in given.items():
                is_json = kind == "json"
                text = schema_grammar(value, field) if is_json else text_grammar(kind, value, field)
            if isinstance(self, ChatRequest) and text is not None and self.calls_tools:
                functions = [tool["function"] for tool in self.tools or ()]
        if text is None and not functions:
            return None
        if self.ignore_eos:
            raise ApiError(400, f"ignore_eos cannot be combined with {field}", "ignore_eos")
        return Form(field, text, functions, several, thinks)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    @property
    def top(self) -> int | None:
        """How many alternatives to each token are wanted; None for no log-probabilities."""
        raise NotImplementedError

    def options(self, max_tokens: int, processors: Sequence[LogitsProcessor]) -> dict[str, Any]:
        """The options of the engine, but for the seed."""
        return {
            "max_new_tokens": max_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": None if self.greedy or not self.top_k else max(0, self.top_k),
            "top_p": None if self.greedy else self.top_p,
            "min_p": None if self.greedy else self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "min_new_tokens": None if processors else self.min_tokens or None,
            "sequence_bias": [[[t], b] for t, b in (self.logit_bias or {}).items()] or None,
            "logprobs": self.top,
            "logits_processor": processors,
            "verifier": self.verifier,
            **self.rule_options,
        }


class ChatRequest(Conversation, Answering):
    """A request for the next message of a conversation."""

    neutral: ClassVar[Neutral] = NEUTRAL_IN_CHATS

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    parallel_tool_calls: bool = True

    @property
    def top(self) -> int | None:
        """How many alternatives to each token are wanted; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Answering):
    """A request for what follows one text or several."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
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
        """How many alternatives to each token are wanted; None for no log-probabilities."""
        return self.logprobs

    def prompts(self, decoder: Decoder) -> list[list[int]]:
        """Each text as token ids; raises ApiError 400 for an empty one."""
        return [token_ids(each, decoder, self.add_special_tokens) for each in self.texts]


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
    """What is to draft from now on, as `--draft` names it; an empty list: nothing."""

    draft: str | list[str]


class TokensRequest(Body):
    """Tokens to be made into a text."""

    tokens: list[int]


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
    """How a model's `generation_config.json` samples: at temperature 0 where it says so."""
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

    def jobs(self, asked: ChatRequest | CompletionRequest, inbox: Inbox) -> list[Job]:
        """The answers that a request asks for.

        Raises ApiError 400 and UserError for what cannot be honoured.
        """
        missing = {n: v for n, v in self.sampling.items() if getattr(asked, n) is None}
        asked = asked.model_copy(update=missing)
        self.refuse_unknown(asked.logit_bias or (), "logit_bias")
        self.refuse_unknown(asked.stop_token_ids or (), "stop_token_ids")
        prompts = asked.prompts(self.decoder)
        if len(prompts) * asked.n > MOST_CHOICES:
            raise ApiError(400, f"a request may have {MOST_CHOICES} answers at most", "n")
        seed = secrets.randbits(62) if asked.seed in (None, -1) else asked.seed
        stops = [asked.stop] if isinstance(asked.stop, str) else (asked.stop or [])
        assert self.decoder.tokenizer is not None
        jobs, drafts = list[Job](), self.drafts(asked)
        for number, ids in enumerate(prompts):
            limit, begun = self.limit(asked, len(ids)), self.has_begun(asked, ids)
            for _ in range(asked.n):
                masks = self.masks(asked, begun, len(ids))
                options = asked.options(max(1, limit), masks)
                settings = read_options({**options, "seed": seed + len(jobs)})
                request = self.decoder.request(ids, settings)
                text = AnswerText(
                    self.decoder.tokenizer,
                    self.grammars.bytes_of,
                    [stop for stop in stops if stop],
                    frozenset(asked.stop_token_ids or ()),
                    asked.skip_special_tokens,
                    ids,
                    self.marks(asked),
                )
                ends = frozenset[int]() if asked.ignore_eos else request.end_ids
                request = replace(
                    request,
                    stops=[text],
                    end_ids=self.grammars.ends if masks else ends,
                    cache_salt=asked.cache_salt,
                    drafts=drafts,
                )
                metrics, choice = AnswerMetrics(self.metrics), len(jobs)
                source = self.source(asked, request, number)
                jobs.append(
                    Job(request, inbox, text, metrics, choice, number, thinks=begun, source=source)
                )
        return jobs

    def source(
        self, asked: ChatRequest | CompletionRequest, request: Request, prompt: int
    ) -> Source | None:
        """What an answer may be recorded with; None where it may not, see `Recorder`."""
        is_own = self.decoder.rule(request).lossless and not request.processors
        if asked.store is False or not is_own:
            return None
        if isinstance(asked, CompletionRequest):
            text = self.decoder.tokenizer.decode([*request.prompts[0]])  # type: ignore[union-attr]
            return Source([{"role": "user", "content": str(text)}], {})
        if asked.continue_final_message:
            return None
        messages = [message.model_dump(exclude_none=True) for message in asked.messages]
        return Source(messages, asked.template_arguments)

    @cached_property
    def is_thinker(self) -> bool:
        """Whether the model may think first: its template or its tokenizer has the marks."""
        tokenizer = self.decoder.tokenizer
        assert tokenizer is not None
        template = str(tokenizer.chat_template)
        return END_OF_THOUGHT in template or END_OF_THOUGHT in tokenizer.get_added_vocab()

    def has_begun(
        self, asked: ChatRequest | CompletionRequest, prompt: Sequence[int]
    ) -> bool | None:
        """Whether a prompt ends within thoughts; None where the answer may begin with some."""
        if not (isinstance(asked, ChatRequest) and self.is_thinker):
            return False
        end = self.decoder.tokenizer.decode([*prompt[-LAST:]])  # type: ignore[union-attr]
        begins = str(end).rstrip().endswith(THOUGHT)
        return True if begins else None

    def marks(self, asked: ChatRequest | CompletionRequest) -> list[str]:
        """What is part of an answer's text though it may be special tokens."""
        if not isinstance(asked, ChatRequest):
            return []
        calls = [CALL, END_OF_CALL] if asked.calls_tools else []
        return [*calls, *([THOUGHT, END_OF_THOUGHT] if self.is_thinker else [])]

    def drafts(self, asked: ChatRequest | CompletionRequest) -> frozenset[str] | None:
        """What may draft for a request; None: all that the decoder has.

        Raises ApiError 400 for other names, and beside a rule that cannot draft for rows apart.
        """
        drafter, names = self.decoder.drafter, asked.draft
        known = () if drafter is None else drafter.names
        if names is True or (drafter is None and not names):
            return None
        wanted = frozenset(names or ())
        if unknown := sorted(wanted - {*known}):
            there = ", ".join(known) or "none"
            raise ApiError(
                400, f"draft {unknown[0]} is not here: the drafters are {there}", "draft"
            )
        if wanted == {*known}:
            return None
        if asked.verifier not in ("auto", *FOLLOWING):
            rules = f"use auto, {' or '.join(FOLLOWING)}"
            sentence = f"draft cannot be combined with the rule {asked.verifier}: {rules}"
            raise ApiError(400, sentence, "draft")
        return wanted

    def masks(
        self, asked: ChatRequest | CompletionRequest, thinks: bool | None, prompt_length: int
    ) -> list[LogitsProcessor]:
        """What keeps an answer in the form that is asked for; raises ApiError 400 for no form."""
        form = asked.form(thinks)
        return [] if form is None else [self.grammars.mask(form, prompt_length, asked.min_tokens)]

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
