"""What clients of other servers expect: items, calls that are demanded, forms, thoughts, ids."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from serve_stream import events
from tiny import byte_target, byte_tokenizer
from tokenizers import AddedToken
from transformers import GenerationConfig

from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.scheduling.running_rows import RunningRows
from drafthead.serve.app import make_app
from drafthead.serve.json_grammar import Form, GrammarTrial, text_grammar
from drafthead.serve.protocol import Reader
from drafthead.serve.server_options import ServerOptions

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{{ tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if begun %}<think>\n{% endif %}{% endif %}{# </think> #}"
)
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
        "additionalProperties": False, "$defs": {"City": {"enum": ["Rome", "Oslo"]}}}  # fmt: skip
TIME = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [{"name": "weather", "parameters": CITY}, {"name": "time", "parameters": TIME}]
TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]
FLAT = [{"type": "function", "strict": False, **each} for each in FUNCTIONS]
NAMED = {"type": "function", "function": {"name": "weather"}}
THOUGHT = 'I call <tool_call>\n{"name": "time", "arguments": {}}\n</tool_call> or not.'
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module", params=["text", "tokens"])
def client(request) -> Iterator[TestClient]:
    """Of a model whose marks are texts, or tokens: of thoughts special ones, of calls not."""
    tokenizer = byte_tokenizer()
    if request.param == "text":
        tokenizer.unk_token = "<|pad|>"  # which the marks are not, though their number is unknown
    else:
        marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        tokenizer.add_tokens([AddedToken(mark, special="think" in mark) for mark in marks])
    tokenizer.chat_template = TEMPLATE
    target = byte_target(tokenizer, max_position_embeddings=2048)
    options = ServerOptions("tiny", other_names=("alias",), max_batch=4)
    with TestClient(make_app(Decoder(target, PromptLookup(3)), options)) as it:
        yield it


@pytest.fixture
def api(client: TestClient) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://test/v1", api_key="none", http_client=client)


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """From now on the model says nothing but a text."""

    def masks(self: Reader, asked: Any, thinks: Any, length: int) -> list[Any]:
        grammar = text_grammar("choice", [text], "it")
        for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
            named = self.grammars.mark(mark)
            if not named.startswith('"'):
                start = grammar["lark_grammar"].replace(mark, f'" {named} "')
                grammar = {"lark_grammar": start}
        return [self.grammars.mask(Form("it", grammar, thinks=False), length, 0)]

    monkeypatch.setattr(Reader, "masks", masks)
    monkeypatch.setattr(GrammarTrial, "refuse_costly", lambda *_: None)  # it knows no such tokens


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("begun", [False, True])
def test_a_call_that_is_demanded_is_made(api, choice, begun) -> None:
    """Also by a model that says nothing sensible, and after its thoughts."""
    body = {"model": "tiny", "messages": MESSAGES, "temperature": 0.7, "seed": 5}
    extra = {"chat_template_kwargs": {"begun": begun}, "logit_bias": bias(api, "</think>")}
    answer = api.chat.completions.create(
        **body, tools=TOOLS, tool_choice=choice, max_tokens=200, extra_body=extra
    ).choices[0]
    if begun and not extra["logit_bias"]:
        assert answer.finish_reason == "length" and not answer.message.tool_calls
        return
    assert answer.finish_reason == "tool_calls" and not answer.message.content
    for call in answer.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert arguments["city"] in ("Rome", "Oslo")
        else:
            assert arguments == {} and choice == "required"
    if choice != "required":
        assert len(answer.message.tool_calls) == 1


def test_a_call_that_is_demanded_has_an_object_for_arguments(client) -> None:
    """Though many do not say in a schema that they mean one; other types are refused."""
    city = {"properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    body = {"messages": MESSAGES, "tool_choice": "required", "parallel_tool_calls": False}
    body |= {"temperature": 1, "max_tokens": 160}
    for parameters in (city, {**city, "type": ["object", "null"]}, {"anyOf": [city]}, {}, None):
        tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
        answer = client.post(CHAT, json={**body, "tools": [tool], "seed": 1}).json()
        message = answer["choices"][0]["message"]
        for call in message.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        assert message.get("tool_calls") or answer["choices"][0]["finish_reason"] == "length"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    error = client.post(CHAT, json={**body, "tools": [tool]}).json()["error"]
    assert error["param"] == "tools" and "the type of this schema is object" in error["message"]


def bias(api: openai.OpenAI, text: str) -> dict[str, float]:
    """Thoughts of a random model have no end: its mark, or what the mark is made of, is likely."""
    tokens = api.post("/../tokenize", body={"prompt": text}, cast_to=object)["tokens"]  # type: ignore[call-overload]
    return {str(token): 100.0 for token in tokens} if len(tokens) == 1 else {}


def test_an_answer_is_a_form_or_calls_where_both_may_be(client, monkeypatch) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"const": "done"}}}
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 100, "response_format": form}
    found = set()
    for seed in range(4):
        answer = client.post(CHAT, json={**body, "temperature": 2, "seed": seed}).json()
        choice = answer["choices"][0]
        message = choice["message"]
        if choice["finish_reason"] == "length":
            continue  # in thoughts that have no end
        found.add(choice["finish_reason"])
        assert message["content"] == '"done"' or message["tool_calls"]
    assert found <= {"stop", "tool_calls"}


WRONG = {
    "choice": ({"tool_choice": "any", "tools": TOOLS}, "tool_choice is none, auto, required"),
    "no tools": ({"tool_choice": "required"}, "the name of one of the tools"),
    "name": ({"tool_choice": {**NAMED, "function": {"name": "x"}}, "tools": TOOLS}, "name of one"),
    "two": ({"guided_regex": "a", "guided_choice": ["b"]}, "are two forms of one answer"),
    "regex": ({"guided_regex": "("}, "guided_regex is refused"),
    "grammar": ({"guided_grammar": 'root ::= "a'}, "the grammar is refused"),
    "unknown rule": ({"guided_grammar": "start: other"}, "guided_grammar is refused"),
    "token": ({"guided_grammar": "start: <other>"}, "guided_grammar is refused"),
    "long": ({"guided_regex": "a" * 70_000}, "65536 characters at most"),
    "end": ({"guided_regex": "a", "ignore_eos": True}, "cannot be combined with guided_regex"),
    "backend": ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend"),
    "empty": ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_forms_and_choices_that_are_none_are_refused(client, name) -> None:
    fields, sentence = WRONG[name]
    response = client.post(CHAT, json={"messages": MESSAGES, **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and sentence in error["message"] and error["param"]
    assert "\n" not in error["message"]


FORMS = {
    "regex": ({"guided_regex": "(yes|no)/[0-9]{2}"}, ("yes/", "no/")),
    "choice": ({"guided_choice": ['a "b"', "é\n"]}, ('a "b"', "é\n")),
    "json": ({"guided_json": '{"const": 7}'}, ("7",)),
    "gbnf": ({"guided_grammar": 'root ::= "x" [0-9]'}, ("x",)),
    "lark": ({"structured_outputs": {"grammar": 'start: "y" /[0-9]/'}}, ("y",)),
    "object": ({"structured_outputs": {"json": {"enum": [5, 6]}}}, ("5", "6")),
    "null": ({"structured_outputs": {"choice": ["z"], "regex": None}}, ("z",)),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_under_vllms_names_are_kept_to(client, name) -> None:
    fields, said = FORMS[name]
    body = {"prompt": "hello", "max_tokens": 20, "temperature": 1, "seed": 3, **fields}
    answer = client.post(COMPLETIONS, json=body).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["text"].startswith(said)
    plain = client.post(COMPLETIONS, json={**body, "draft": False}).json()
    assert plain["choices"][0]["text"] == choice["text"]


# ---- thoughts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True])
def test_thoughts_are_no_answer_and_a_call_in_them_is_none(client, monkeypatch, begun) -> None:
    """Whole, in a stream and as items, whether the prompt has begun them or the answer does."""
    say(monkeypatch, ("" if begun else "<think>") + THOUGHT + "</think>\n\nHello." + CALLED)
    asked = {"temperature": 0, "chat_template_kwargs": {"begun": begun}}
    body = {**asked, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 500}
    choice = client.post(CHAT, json=body).json()["choices"][0]
    message = choice["message"]
    assert message["reasoning_content"] == THOUGHT and message["content"] == "Hello."
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert choice["finish_reason"] == "tool_calls"
    stream = client.post(CHAT, json={**body, "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in events(stream.text)]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]
    assert sum(len(delta.get("tool_calls", ())) for delta in deltas) == 1
    found = client.post(RESPONSES, json={**asked, "input": "hello", "tools": FLAT}).json()
    kinds = [item["type"] for item in found["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    assert found["output"][0]["content"][0]["text"] == THOUGHT
    details = found["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < found["usage"]["output_tokens"]


def test_an_answer_that_only_thinks_says_nothing(client, monkeypatch) -> None:
    say(monkeypatch, "<think>" + THOUGHT)
    body = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 500}
    message = client.post(CHAT, json=body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", THOUGHT)
    say(monkeypatch, "<thin")
    message = client.post(CHAT, json=body).json()["choices"][0]["message"]
    assert message["content"] == "<thin" and "reasoning_content" not in message


@pytest.mark.parametrize(
    ("begun", "thought", "said"),
    [
        ("<think>\nOkay", " more", "Done"),
        ([{"type": "text", "text": "<think>"}], " more", "Done"),
        ("<think>\nOkay\n</think>\n\ny", None, " more</think>\n\nDone"),
        ("I say <think>", None, " more</think>\n\nDone"),
    ],
)  # fmt: skip
def test_thoughts_that_a_client_began_go_on(client, monkeypatch, begun, thought, said) -> None:
    say(monkeypatch, " more</think>\n\nDone")
    begins = [*MESSAGES, {"role": "assistant", "content": begun}]
    body = {"messages": begins, "continue_final_message": True, "temperature": 0}
    message = client.post(CHAT, json={**body, "max_tokens": 100}).json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thought, said)


def test_an_answer_does_not_go_on_within_a_call(client) -> None:
    body = {"continue_final_message": True, "tools": TOOLS, "max_tokens": 2}
    for begun, status in ((CALLED[:30], 400), (CALLED, 200), ("so", 200)):
        messages = [*MESSAGES, {"role": "assistant", "content": begun}]
        assert client.post(CHAT, json={**body, "messages": messages}).status_code == status


# ---- items ---------------------------------------------------------------------------------------


def test_a_response_is_the_chats_answer_whole_and_in_events(api, client) -> None:
    asked = {"model": "alias", "temperature": 0, "max_output_tokens": 30}
    chat = client.post(CHAT, json={
        "messages": [{"role": "system", "content": "be kind"}, *MESSAGES],
        "temperature": 0, "max_tokens": 30,
    }).json()  # fmt: skip
    expected = chat["choices"][0]["message"]["content"]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    for given in ("hello", items):
        found = api.responses.create(input=given, instructions="be kind", **asked)
        assert found.output_text == expected and found.model == "tiny"
        assert found.status == "incomplete"
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.usage.output_tokens == 30
        assert found.usage.input_tokens == chat["usage"]["prompt_tokens"]
    events = list(api.responses.create(input="hello", instructions="be kind", stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == expected == events[-1].response.output_text
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")


def test_an_error_within_events_is_one_of_them(client, monkeypatch) -> None:
    monkeypatch.setattr(RunningRows, "admit", lambda *_: 1 / 0)
    body = {"input": "hello", "temperature": 0, "max_output_tokens": 3, "stream": True}
    last = client.post(RESPONSES, json=body).text.split("\n\n")[-2]
    assert last.startswith("event: error\ndata: ")
    error = json.loads(last.partition("data: ")[2])
    assert error.pop("sequence_number") > 0
    message = "decoding failed: division by zero"
    assert error == {"type": "error", "code": "server_error", "message": message, "param": None}


def test_calls_of_items_come_back_with_their_results(api, client, monkeypatch) -> None:
    seen: list[Any] = []
    real = Reader.jobs
    monkeypatch.setattr(
        Reader, "jobs", lambda self, asked, *more: seen.append(asked) or real(self, asked, *more)
    )
    with monkeypatch.context() as patched:
        say(patched, CALLED)
        asked = {"model": "tiny", "input": "hello", "tools": FLAT}
        first = api.responses.create(**asked, tool_choice="required")
        with api.responses.stream(**asked) as stream:
            [streamed] = stream.get_final_response().output
    [call] = first.output
    assert (call.name, call.arguments) == (streamed.name, streamed.arguments)
    assert json.loads(call.arguments) == {"city": "Oslo"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
        {"type": "reasoning_text", "text": "hm"}]}  # fmt: skip
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
    history = [*MESSAGES, thought, call.model_dump(), result, {"role": "developer", "content": "!"}]
    api.responses.create(model="tiny", input=history, tools=FLAT, max_output_tokens=4)
    roles = [message.role for message in seen[-1].messages]
    assert roles == ["user", "assistant", "tool", "system"]
    said = seen[-1].messages[1]
    assert said.reasoning_content == "hm" and said.tool_calls[0]["id"] == call.call_id
    assert seen[-1].messages[2].content == "cold"


@pytest.mark.parametrize(
    "silent", [{}, {"content": []}, {"encrypted_content": "gAAA"}, {"summary": []}]
)
def test_a_reasoning_item_without_a_text_is_no_message(client, silent) -> None:
    """It is of another model, which tells none."""
    history = [*MESSAGES, {"type": "reasoning", "id": "rs_1", "summary": [], **silent}]
    texts = [{"type": "reasoning_text", "text": "hm"}], [{"type": "summary_text", "text": "hm"}]
    read = [
        client.post(RESPONSES, json={"input": [*items, *MESSAGES], "max_output_tokens": 1}).json()
        for items in (
            history, MESSAGES,
            [*history[:-1], {"type": "reasoning", "content": texts[0], "summary": texts[1]}],
            [*history[:-1], {"type": "reasoning", "summary": texts[1]}],
        )
    ]  # fmt: skip
    counts = [answer["usage"]["input_tokens"] for answer in read]
    assert counts[0] == counts[1] < counts[2] == counts[3]


REFUSED = {
    "previous": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "n": ({"n": 2}, "n"),
    "background": ({"background": True}, "background"),
    "effort": ({"reasoning": {"effort": "low"}}, "reasoning"),
    "include": ({"include": ["message.output_text.logprobs"]}, "include"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content",
    ),
    "item": ({"input": [{"type": "computer_call"}]}, "input.0"),
    "field": ({"input": [{"role": "user", "content": "a", "at": 5}]}, "input.0.at"),
    "tool": ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    "format": ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    "temperature": ({"temperature": -1}, "temperature"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_response_that_cannot_be_made_is_refused_by_name(client, name) -> None:
    fields, field = REFUSED[name]
    response = client.post(RESPONSES, json={"input": "hello", **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == field


# ---- the server ----------------------------------------------------------------------------------


def test_a_server_is_ready_until_its_queue_is_full(client) -> None:
    server = client.app.state.server
    assert client.get("/ready").status_code == 200
    most, server.queue.most = server.queue.most, -4
    try:
        assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
    finally:
        server.queue.most = most


def test_a_model_has_several_names(client) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny", "alias"]
    assert client.get("/v1/models/alias").json()["id"] == "alias"
    body = {"messages": MESSAGES, "max_tokens": 1, "model": "alias"}
    assert client.post(CHAT, json=body).json()["model"] == "tiny"


@pytest.mark.parametrize(("own", "expected"), [({"do_sample": False}, 0), ({"top_k": 1}, 0)])
def test_requests_are_sampled_as_the_models_file_says_where_asked_for(
    client, monkeypatch, own, expected
) -> None:
    """Top-k of 1 is greedy, and a request that names another number has that."""
    decoder = client.app.state.server.decoder
    monkeypatch.setattr(decoder.target.model, "generation_config", GenerationConfig(**own))
    body = {"messages": MESSAGES, "max_tokens": 30, "draft": False}
    greedy = client.post(CHAT, json={**body, "temperature": expected}).json()["choices"]
    with TestClient(make_app(decoder, ServerOptions("tiny", model_sampling=True))) as other:
        assert other.post(CHAT, json=body).json()["choices"] == greedy
        drawn = {**body, "temperature": 1.5, "top_k": 0, "seed": 1}
        assert other.post(CHAT, json=drawn).json()["choices"] != greedy
