"""A field is used, neutral, or refused by name: those of OpenAI's and vLLM's requests, a row each.

OpenAI's are read from the types of its client, which are made of its OpenAPI document.
"""

import json
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
from fastapi.testclient import TestClient
from openai.types import completion_create_params
from openai.types.chat import (
    chat_completion_assistant_message_param,
    chat_completion_user_message_param,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from serve_stream import events
from tiny import byte_target, byte_tokenizer
from tokenizers.processors import TemplateProcessing
from typing_extensions import is_typeddict

from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.serve.app import make_app
from drafthead.serve.items import ResponsesRequest
from drafthead.serve.protocol import ChatRequest, CompletionRequest
from drafthead.serve.server_options import ServerOptions

CHAT, COMPLETIONS, RESPONSES = "chat/completions", "completions", "responses"
ALL, TEXTS, CHATS = (CHAT, COMPLETIONS, RESPONSES), (CHAT, COMPLETIONS), (CHAT, RESPONSES)
OPENAI = {
    CHAT: chat_params.CompletionCreateParamsNonStreaming,
    COMPLETIONS: completion_create_params.CompletionCreateParamsNonStreaming,
    RESPONSES: response_create_params.ResponseCreateParamsNonStreaming,
}


def words(text: str) -> list[str]:
    """Its words."""
    return text.split()


OURS = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest}
# Beside OpenAI's, of the documentation of vLLM 0.26 and of its main branch.
OF_BOTH = words(
    "top_k min_p repetition_penalty length_penalty stop_token_ids use_beam_search ignore_eos "
    "include_stop_str_in_output min_tokens skip_special_tokens spaces_between_special_tokens "
    "truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs add_special_tokens "
    "response_format structured_outputs priority request_id return_tokens_as_token_ids "
    "return_token_ids return_token_offsets routed_experts_prompt_start cache_salt stream_interval "
    "kv_transfer_params ec_transfer_params vllm_xargs repetition_detection logits_processors "
    "structured_outputs.json structured_outputs.regex structured_outputs.choice "
    "structured_outputs.grammar structured_outputs.json_object structured_outputs.structural_tag "
    "structured_outputs.disable_any_whitespace structured_outputs.whitespace_pattern "
    "structured_outputs.disable_additional_properties stream_options.continuous_usage_stats "
    "stream_options.include_usage guided_json guided_regex guided_choice guided_grammar"
)
VLLM = {
    CHAT: OF_BOTH
    + words(
        "echo add_generation_prompt continue_final_message documents chat_template media_io_kwargs "
        "chat_template_kwargs mm_processor_kwargs return_prompt_text include_reasoning bad_words "
        "thinking_token_budget session_id messages.assistant.reasoning "
        "messages.assistant.reasoning_content"
    ),
    COMPLETIONS: [*OF_BOTH, "prompt_embeds"],
    RESPONSES: words(
        "request_id media_io_kwargs mm_processor_kwargs priority cache_salt logit_bias top_k seed "
        "enable_response_messages previous_input_messages structured_outputs repetition_penalty "
        "stop ignore_eos skip_special_tokens vllm_xargs kv_transfer_params"
    ),
}
TEMPLATE = (
    "{{ tools }}{{ dim }}{% for m in messages %}<|{{ m.role }}|>{{ m.reasoning }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": EMPTY}}
FLAT = {"type": "function", "name": "f", "parameters": EMPTY}
HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GREEDY = {"temperature": 0}
ENDLESS = {"logit_bias": {"10": 100}}  # of "'", again and again
SCHEMA, AB = {"enum": ["ab"]}, '"ab"'


class Row(NamedTuple):
    """What a field does."""

    verdict: Literal["used", "neutral", "refused"]
    value: Any = 2  # of the field; of one within another all fields that it needs
    base: dict[str, Any] = {}  # noqa: RUF012  # fields without which it does nothing
    shows: Callable[[Any, Any], bool] = lambda answer, plain: answer != plain
    why: str = ""


def used(value: Any, shows: Any = Row._field_defaults["shows"], **base: Any) -> Row:
    """A field with which the answer is another one, by default, than without it."""
    return Row("used", value, base, shows)


def neutral(value: Any, why: str, **base: Any) -> Row:
    """A field with which nothing changes."""
    return Row("neutral", value, base, why=why)


def refused(value: Any) -> Row:
    """A field that is refused with this value."""
    return Row("refused", value)


def text_of(answer: Any) -> str:
    """What an answer of any endpoint says."""
    if "output" in answer:
        parts = [part for item in answer["output"] for part in item.get("content", ())]
        return "".join(part["text"] for part in parts)
    [choice, *_] = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"] or ""


def says(text: str) -> Callable[[Any, Any], bool]:
    """Whether the answer, and not the plain one, is a text."""
    return lambda answer, plain: text_of(answer) == text != text_of(plain)


def said(**message: Any) -> dict[str, Any]:
    """A conversation that begins with a message."""
    return {"messages": [{"role": "user", "content": "a", **message}, HELLO]}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    """An input with an item."""
    return {"input": [{"type": kind, **fields}, HELLO]}


def form(_: str, kind: str, **fields: Any) -> dict[str, Any]:
    """The form of a response's text."""
    return {"text": {"format": {"type": kind, **fields}}}


def is_object(answer: Any, _: Any) -> bool:
    """Whether the answer begins as a JSON object."""
    return text_of(answer)[0] == "{"


def calls(answer: Any, _: Any = None) -> int:
    """How many calls an answer makes."""
    if "output" in answer:
        return sum(each["type"] == "function_call" for each in answer["output"])
    return len(answer["choices"][0]["message"].get("tool_calls", ()))


def tokens_of(answer: Any) -> int:
    """How many tokens an answer has."""
    usage = answer["usage"]
    return usage.get("completion_tokens", usage.get("output_tokens"))


CALLING = {"tools": [TOOL], "max_tokens": 130}
CALLING_FLAT = {"tools": [FLAT], "max_output_tokens": 130}
AGAIN = {"202": 100}  # a line end, after which a further call begins
# A field, or several of one row. What a value that is a function gets are the names after a dot.
ROWS: list[tuple[tuple[str, ...], str, Row]] = [
    # ---- what is decoded ----
    (ALL, "model", used("other", lambda answer, _: answer["error"]["code"] == "model_not_found")),
    ((CHAT,), "messages", used([{"role": "user", "content": "other"}])),
    ((COMPLETIONS,), "prompt", used("other")),
    ((RESPONSES,), "input", used("other")),
    ((RESPONSES,), "instructions", used("be kind")),
    ((COMPLETIONS,), "add_special_tokens", used(False)),
    ((CHAT,), "add_generation_prompt", neutral(True, "as without it")),
    ((CHAT,), "continue_final_message", used(True)),
    (CHATS, "chat_template_kwargs", used({"dim": True})),
    ((CHAT,),
     "messages.user.role messages.system.role messages.developer.role messages.assistant.role "
     "messages.tool.role messages.function.role messages.user.content messages.system.content "
     "messages.developer.content messages.assistant.content messages.tool.content "
     "messages.function.content", used(lambda role, _: said(role=role, content="b"))),
    ((CHAT,),
     "messages.user.name messages.system.name messages.developer.name messages.assistant.name",
     refused(lambda role, _: said(role=role, name="me"))),
    ((CHAT,), "messages.assistant.tool_calls",
     used(lambda role, _: said(role=role, tool_calls=[CALL]))),
    ((CHAT,), "messages.assistant.reasoning messages.assistant.reasoning_content",
     used(lambda role, name: said(role=role, **{name: "hm"}))),
    ((CHAT,),
     "messages.assistant.audio messages.assistant.refusal messages.assistant.function_call",
     refused(lambda role, name: said(role=role, **{name: "no"}))),
    ((CHAT,), "messages.function.name",
     neutral(lambda role, _: said(role=role, name="f"), "the call before has it",
             **said(role="function"))),
    ((CHAT,), "messages.tool.tool_call_id",
     neutral(lambda role, _: said(role=role, tool_call_id="1"), "results are in the calls' order",
             **said(role="tool"))),
    ((CHAT,), "content.text", used(lambda kind: said(content=[{"type": kind, "text": "b"}]))),
    ((CHAT,), "content.image_url content.input_audio content.file content.refusal",
     refused(lambda kind: said(content=[{"type": kind, kind: {"data": "a"}}]))),
    ((RESPONSES,), "input.message", used(item("message", role="user", content="a"))),
    ((RESPONSES,), "input.reasoning",
     used(item("reasoning", content=[{"type": "reasoning_text", "text": "hm"}]))),
    ((RESPONSES,), "input.function_call",
     used(item("function_call", call_id="1", name="f", arguments="{}"))),
    ((RESPONSES,), "input.function_call_output",
     used(item("function_call_output", call_id="1", name="f", output="5"))),
    ((RESPONSES,),
     "input.file_search_call input.computer_call input.computer_call_output input.web_search_call "
     "input.tool_search_call input.tool_search_output input.additional_tools input.program "
     "input.configuration_update input.compaction input.image_generation_call input.shell_call "
     "input.code_interpreter_call input.local_shell_call input.local_shell_call_output "
     "input.shell_call_output input.apply_patch_call input.apply_patch_call_output input.mcp_call "
     "input.mcp_list_tools input.mcp_approval_request input.mcp_approval_response "
     "input.custom_tool_call_output input.custom_tool_call input.compaction_trigger "
     "input.item_reference input.program_output", refused(item)),
    # ---- how tokens are chosen ----
    (ALL, "temperature", used(0)),
    (ALL, "top_p", used(1e-6)),
    (ALL, "top_k", used(1)),
    (ALL, "min_p", used(1.0)),
    (ALL, "seed", used(2)),
    (TEXTS, "presence_penalty frequency_penalty", used(2, max_tokens=40)),
    ((RESPONSES,), "presence_penalty frequency_penalty", used(2, max_output_tokens=40)),
    (ALL, "repetition_penalty", used(100)),
    (ALL, "logit_bias", used({"10": 100})),
    (ALL, "verifier", used("typical", lambda answer, plain: not answer["recorded"])),
    (ALL, "rule_options", refused({})),
    (ALL, "draft", used(False, lambda answer, plain: answer["drafted"] < plain["drafted"],
                        **GREEDY, **ENDLESS)),
    # ---- where answers end, and how many there are ----
    (TEXTS, "max_tokens", used(3)),
    ((CHAT,), "max_completion_tokens", used(3)),
    ((RESPONSES,), "max_output_tokens", used(3)),
    (ALL, "stop", used(["'''"], says(""), **ENDLESS)),
    (ALL, "stop_token_ids", used([10], says(""), **ENDLESS)),
    (ALL, "min_tokens", used(5, lambda answer, plain: tokens_of(answer) == 5 > tokens_of(plain),
                             stop=["'''"], stop_token_ids=[11], **ENDLESS)),
    (ALL, "ignore_eos", used(True, logit_bias={"1": 100})),
    (TEXTS, "n", used(2, lambda answer, _: len(answer["choices"]) == 2)),
    # ---- forms and calls ----
    (TEXTS, "response_format", used({"type": "json_schema", "json_schema": {"schema": SCHEMA}})),
    ((CHAT,), "response_format.text",
     neutral(lambda kind: {"response_format": {"type": kind}}, "as without it")),
    ((CHAT,), "response_format.json_object",
     used(lambda kind: {"response_format": {"type": kind}}, is_object)),
    ((CHAT,), "response_format.json_schema",
     used(lambda kind: {"response_format": {"type": kind, kind: {"schema": SCHEMA}}}, says(AB))),
    ((RESPONSES,), "text", used({"format": {"type": "json_schema", "schema": SCHEMA}}, says(AB))),
    ((RESPONSES,), "text.format.text", neutral(form, "as without it")),
    ((RESPONSES,), "text.format.json_object", used(form, is_object)),
    ((RESPONSES,), "text.format.json_schema",
     used(lambda *kind: form(*kind, schema=SCHEMA, name="it", strict=True), says(AB))),
    ((RESPONSES,), "text.verbosity", refused({"text": {"verbosity": "low"}})),
    ((CHAT,), "verbosity", refused("low")),
    (ALL, "structured_outputs", used({"choice": ["ab"]}, says("ab"))),
    (TEXTS, "structured_outputs.json",
     used(lambda kind: {"structured_outputs": {kind: SCHEMA}}, says(AB))),
    (TEXTS, "structured_outputs.regex",
     used(lambda kind: {"structured_outputs": {kind: ""}}, says(""))),
    (TEXTS, "structured_outputs.choice",
     used(lambda kind: {"structured_outputs": {kind: ["ab"]}}, says("ab"))),
    (TEXTS, "structured_outputs.grammar",
     used(lambda kind: {"structured_outputs": {kind: 'start: "ab"'}}, says("ab"))),
    (TEXTS, "structured_outputs.json_object",
     used(lambda kind: {"structured_outputs": {kind: True}}, is_object)),
    (TEXTS, "structured_outputs.disable_any_whitespace",
     neutral(lambda name: {"structured_outputs": {"choice": ["ab"], name: True}},
             "no form has optional white space", structured_outputs={"choice": ["ab"]})),
    (TEXTS,
     "structured_outputs.structural_tag structured_outputs.whitespace_pattern "
     "structured_outputs.disable_additional_properties",
     refused(lambda name: {"structured_outputs": {name: "a"}})),
    (ALL, "guided_json", used(SCHEMA, says(AB))),
    (ALL, "guided_regex", used("", says(""))),
    (ALL, "guided_choice", used(["ab"], says("ab"))),
    (ALL, "guided_grammar", used('start: "ab"', says("ab"))),
    ((CHAT,), "tools tools.function", used(lambda *_: {"tools": [TOOL]})),
    ((RESPONSES,), "tools tools.function", used(lambda *_: {"tools": [FLAT]})),
    ((CHAT,), "tools.custom",
     refused(lambda kind: {"tools": [{"type": kind, kind: {"name": "f"}}]})),
    ((RESPONSES,),
     "tools.function.allowed_callers tools.function.async tools.function.defer_loading "
     "tools.function.output_schema", refused(lambda _, name: {"tools": [{**FLAT, name: True}]})),
    ((RESPONSES,),
     "tools.file_search tools.computer tools.computer_use_preview tools.web_search tools.mcp "
     "tools.web_search_2025_08_26 tools.shell tools.code_interpreter tools.image_generation "
     "tools.programmatic_tool_calling tools.local_shell tools.custom tools.namespace "
     "tools.tool_search tools.web_search_preview tools.web_search_preview_2025_03_11 "
     "tools.apply_patch", refused(lambda kind: {"tools": [{"type": kind}]})),
    ((CHAT,), "tool_choice", used("none", tools=[TOOL])),
    ((RESPONSES,), "tool_choice", used("none", tools=[FLAT])),
    ((CHAT,), "tool_choice.function",
     used(lambda kind: {"tool_choice": {"type": kind, kind: {"name": "f"}}}, calls, **CALLING)),
    ((CHAT,), "tool_choice.allowed_tools",
     used(lambda kind: {"tool_choice": {"type": kind, kind: {"mode": "required", "tools": [
         {"type": "function", "function": {"name": "f"}}]}}}, calls, **CALLING)),
    ((RESPONSES,), "tool_choice.function",
     used(lambda kind: {"tool_choice": {"type": kind, "name": "f"}}, calls, **CALLING_FLAT)),
    ((RESPONSES,), "tool_choice.allowed_tools",
     used(lambda kind: {"tool_choice": {"type": kind, "mode": "required", "tools": [
         {"type": "function", "name": "f"}]}}, calls, **CALLING_FLAT)),
    ((CHAT,), "tool_choice.custom",
     refused(lambda kind: {"tools": [TOOL], "tool_choice": {"type": kind}})),
    ((RESPONSES,),
     "tool_choice.file_search tool_choice.web_search_preview tool_choice.computer tool_choice.mcp "
     "tool_choice.computer_use_preview tool_choice.computer_use tool_choice.shell "
     "tool_choice.web_search_preview_2025_03_11 tool_choice.image_generation tool_choice.custom "
     "tool_choice.code_interpreter tool_choice.apply_patch tool_choice.programmatic_tool_calling",
     refused(lambda kind: {"tools": [FLAT], "tool_choice": {"type": kind}})),
    ((CHAT,), "parallel_tool_calls",
     used(False, lambda answer, plain: calls(answer) == 1 < calls(plain), **CALLING,
          tool_choice="required", logit_bias=AGAIN)),
    ((RESPONSES,), "parallel_tool_calls",
     used(False, lambda answer, plain: calls(answer) == 1 < calls(plain), **CALLING_FLAT,
          tool_choice="required", logit_bias=AGAIN)),
    # ---- what is told ----
    ((CHAT,), "logprobs", used(True, lambda a, _: a["choices"][0]["logprobs"]["refusal"] is None)),
    ((CHAT,), "top_logprobs", used(3, logprobs=True)),
    ((COMPLETIONS,), "logprobs", used(2)),
    ((COMPLETIONS,), "echo", used(True, lambda a, p: text_of(a) == "hello" + text_of(p))),
    (ALL, "skip_special_tokens",
     used(False, lambda a, _: "<|user|>" in text_of(a), logit_bias={"2": 100})),
    ((CHAT,), "return_token_ids", used(True, lambda a, _: a["prompt_token_ids"])),
    ((COMPLETIONS,), "return_token_ids",
     used(True, lambda a, _: a["choices"][0]["prompt_token_ids"])),
    (TEXTS, "return_drafted", used(True, lambda a, _: "drafted" in json.dumps(a), stream=True)),
    (ALL, "stream", used(True, lambda answer, _: len(answer) > 2)),
    (TEXTS, "stream_options", used({"include_usage": True}, stream=True)),
    (TEXTS, "stream_options.include_usage",
     used(lambda name: {"stream_options": {name: True}},
          lambda a, _: a[-1]["usage"] and not a[0]["usage"], stream=True)),
    (TEXTS, "stream_options.continuous_usage_stats",
     used(lambda name: {"stream_options": {name: True}},
          lambda a, _: a[0]["usage"]["total_tokens"] < a[-1]["usage"]["total_tokens"],
          stream=True)),
    (ALL, "request_id", used("mine", lambda answer, _: answer["id"].endswith("mine"))),
    (ALL, "store", used(False, lambda answer, plain: answer["recorded"] < plain["recorded"])),
    ((RESPONSES,), "metadata", used({"a": "b"}, lambda a, _: a["metadata"] == {"a": "b"})),
    ((RESPONSES,), "user safety_identifier prompt_cache_key",
     used("me", lambda a, p: "me" in a.values() and "me" not in p.values())),
    # ---- what changes no answer ----
    ((CHAT,), "metadata", neutral({"a": "b"}, "for lists of stored answers, of which none exist")),
    (TEXTS, "user", neutral("me", "answers are nobody's")),
    ((CHAT,), "safety_identifier prompt_cache_key", neutral("me", "answers are nobody's")),
    (ALL, "cache_salt", neutral("a", "what is read again is the same, see test_serve_app.py")),
    (CHATS, "prompt_cache_retention", neutral("24h", "what is kept changes no answer")),
    (ALL, "prompt_cache_options", neutral({"ttl": "30m"}, "what is kept changes no answer")),
    (CHATS, "prompt_cache_options.mode prompt_cache_options.ttl",
     neutral(lambda name: {"prompt_cache_options": {name: "a"}}, "what is kept changes no answer")),
    ((RESPONSES,), "prompt_cache_options.prewarm prompt_cache_options.comparison_response_id",
     refused(lambda name: {"prompt_cache_options": {name: True}})),
    ((CHAT,), "prediction",
     neutral({"type": "content", "content": "a"}, "a draft, which changes no text")),
    (CHATS, "service_tier", neutral("auto", "there is one tier")),
    ((RESPONSES,), "max_tool_calls", neutral(1, "of the server's own tools: there are none")),
    ((RESPONSES,), "include",
     neutral(["reasoning.encrypted_content"], "a reasoning item has its text to be sent back")),
    (ALL, "stream_options.include_obfuscation",
     neutral({"stream_options": {"include_obfuscation": False}}, "there is none", stream=True)),
    ((RESPONSES,), "stream_options",
     neutral({"include_obfuscation": True}, "the same text", stream=True)),
    ((CHAT,), "modalities", neutral(["text"], "there is only text")),
    ((CHAT,), "include_reasoning", neutral(True, "as without it")),
    ((CHAT,), "bad_words", neutral([], "none")),
    ((CHAT,), "add_special_tokens echo return_prompt_text", neutral(False, "as without it")),
    (TEXTS, "spaces_between_special_tokens", neutral(True, "as without it")),
    (TEXTS, "use_beam_search include_stop_str_in_output return_tokens_as_token_ids "
            "return_token_offsets", neutral(False, "as without it")),
    (TEXTS, "priority routed_experts_prompt_start", neutral(0, "as without it")),
    (TEXTS, "length_penalty", neutral(1, "as without it")),
    ((COMPLETIONS,), "best_of", neutral(1, "one answer is the best of one")),
    ((COMPLETIONS,), "suffix", neutral("", "none")),
    ((RESPONSES,), "background enable_response_messages", neutral(False, "as without it")),
    ((RESPONSES,), "truncation", neutral("disabled", "as without it")),
    ((RESPONSES,), "top_logprobs priority", neutral(0, "as without it")),
    ((RESPONSES,), "reasoning", neutral({}, "nothing is asked for")),
    # ---- what nobody reads ----
    ((RESPONSES,),
     "reasoning.context reasoning.effort reasoning.generate_summary reasoning.mode "
     "reasoning.summary", refused(lambda name: {"reasoning": {name: "auto"}})),
    ((CHAT,),
     "audio function_call functions moderation reasoning_effort web_search_options documents "
     "chat_template mm_processor_kwargs media_io_kwargs thinking_token_budget session_id",
     refused(2)),
    (TEXTS,
     "truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs vllm_xargs "
     "stream_interval kv_transfer_params ec_transfer_params repetition_detection "
     "logits_processors", refused(2)),
    ((COMPLETIONS,), "prompt_embeds", refused(2)),
    ((RESPONSES,),
     "access_programs background_options context_management conversation image moderation "
     "previous_response_id prompt previous_input_messages vllm_xargs kv_transfer_params "
     "media_io_kwargs mm_processor_kwargs", refused(2)),
]  # fmt: skip
PAIRS = [
    (where, name, row) for places, names, row in ROWS for name in words(names) for where in places
]
TABLE = {(where, name): row for where, name, row in PAIRS}


# ---- the list ------------------------------------------------------------------------------------


def dicts(hint: Any) -> Iterator[Any]:
    """The typed dictionaries of a hint."""
    if is_typeddict(hint):
        yield hint
    else:
        for inner in get_args(hint):
            yield from dicts(inner)


def literals(hint: Any) -> list[str]:
    """The words of a hint."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [word for inner in get_args(hint) for word in literals(inner)]


def kinds(name: str, hint: Any) -> Iterator[str]:
    """The types of objects that a field may hold, as `tools.function`."""
    for each in dicts(hint):
        for kind in literals(get_type_hints(each)["type"]):
            yield f"{name}.{kind}"


def within(name: str, hint: Any) -> Iterator[str]:
    """The fields of the objects that a field may hold, as `stream_options.include_usage`."""
    for each in dicts(hint):
        yield from (f"{name}.{inner}" for inner in get_type_hints(each))


def openais(where: str) -> set[str]:
    """The fields of a request of OpenAI, and those within the ones that have a meaning here."""
    hints = get_type_hints(OPENAI[where])
    found = set(hints)
    for name in {"stream_options", "prompt_cache_options", "reasoning"} & found:
        found |= {*within(name, hints[name])}
    for name in {"tools", "tool_choice", "response_format", "input"} & found:
        found |= {*kinds(name, hints[name])}
    if where == CHAT:
        for message in dicts(hints["messages"]):
            own = get_type_hints(message)
            [role] = literals(own["role"])
            found |= {f"messages.{role}.{name}" for name in own}
        for module in (chat_completion_user_message_param, chat_completion_assistant_message_param):
            [kind] = [v for n, v in vars(module).items() if n.endswith("MessageParam")]
            found |= {*kinds("content", get_type_hints(kind)["content"])}
    if where == RESPONSES:
        [text] = dicts(hints["text"])
        found |= {*kinds("text.format", get_type_hints(text)["format"]), "text.verbosity"}
        [function] = [d for d in dicts(hints["tools"]) if d.__name__ == "FunctionToolParam"]
        read = {"type", "name", "description", "parameters", "strict"}
        found |= {f"tools.function.{name}" for name in get_type_hints(function).keys() - read}
    return found


@pytest.mark.parametrize("where", ALL)
def test_every_field_has_one_row(where: str) -> None:
    known = openais(where) | {*VLLM[where]} | OURS[where].model_fields.keys()
    rows = [name for place, name, _ in PAIRS if place == where]
    assert len(rows) == len({*rows})
    assert known - {*rows} == set()
    assert {*rows} - known == set()


# ---- the rows ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    begins = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 2)])
    tokenizer.backend_tokenizer.post_processor = begins
    target = byte_target(tokenizer, max_position_embeddings=1024)
    app = make_app(Decoder(target, PromptLookup(3)), ServerOptions("tiny"))
    notes: list[Any] = []
    app.state.server.loop.recorder = SimpleNamespace(note=lambda *n: notes.append(n), close=list)
    app.state.notes = notes
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """The answers to plain requests."""
    return {}


BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HELLO], "max_tokens": 8},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 8},
    RESPONSES: {"input": [HELLO], "max_output_tokens": 8},
}


def ask(client: TestClient, where: str, body: dict[str, Any]) -> Any:
    """An answer without what every request has of its own."""
    app = client.app
    app.state.notes.clear()  # type: ignore[attr-defined]
    response = client.post(f"/v1/{where}", json=body)
    if response.headers["content-type"].startswith("text/event-stream"):
        return events(response.text)
    answer = response.json()
    used = answer.pop("metrics", {"speculative_decoding": {"num_draft_tokens": 0}})
    answer |= {"drafted": used["speculative_decoding"]["num_draft_tokens"]}
    answer |= {"recorded": len(app.state.notes)}  # type: ignore[attr-defined]
    if "id" in body.get("request_id", "id"):
        answer.pop("id", None)
    for name in ("created", "created_at"):
        answer.pop(name, None)
    for each in answer.get("output", ()):
        each.pop("id")
    return answer


@pytest.mark.parametrize(("where", "name"), sorted(TABLE), ids=lambda part: part.partition("/")[0])
def test_a_field_does_as_its_row_says(client, known, where, name) -> None:
    row = TABLE[where, name]
    base = {**BASE[where], "temperature": 1.0, "seed": 1, **row.base}
    field, *parts = name.split(".")
    value = row.value(*parts) if callable(row.value) else row.value
    fields = value if parts or callable(row.value) else {name: value}
    answer = ask(client, where, {**base, **fields})
    if row.verdict == "refused":
        error = answer["error"]
        assert error["type"] == "invalid_request_error" and error["message"]
        assert error["param"] == name or (
            parts and {field, *parts} & {*re.findall(r"\w+", str(error))}
        )
        return
    failed = [event for event in flat(answer) if event.get("error")]
    assert bool(failed) == (name == "model"), failed
    key = json.dumps([where, base])
    plain = known[key] = known.get(key) or ask(client, where, base)
    if row.verdict == "neutral":
        assert row.why and without_events(answer) == without_events(plain)
    else:
        assert row.shows(answer, plain), (answer, plain)


def flat(answer: Any) -> list[dict[str, Any]]:
    """An answer, or the events of a stream."""
    return answer if isinstance(answer, list) else [answer]


def without_events(answer: Any) -> Any:
    """An answer, or what a stream says: how its pieces are cut is a matter of time."""
    if not isinstance(answer, list):
        return answer
    deltas = [event.get("delta") or event.get("choices") for event in answer]
    return json.dumps(deltas)
