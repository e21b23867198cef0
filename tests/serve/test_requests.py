"""What clients send: each field is read, known to change nothing, or refused; none is a failure."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import byte_target, byte_tokenizer
from tokenizers.processors import TemplateProcessing

from drafthead.core.errors import UserError
from drafthead.infer import Decoder
from drafthead.scripts import serve
from drafthead.serve.app import make_app
from drafthead.serve.server_options import ServerOptions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEMPLATE = (
    "{{ tools }}{{ dim }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MESSAGES = [{"role": "user", "content": "hello"}]
ANSWERING = {
    "model": "tiny", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
    "seed": 1, "n": 1, "stop": ["x"], "stop_token_ids": [9], "min_tokens": 1, "stream": False,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
    "logit_bias": {"9": 1.0}, "skip_special_tokens": True, "cache_salt": "a", "user": "me",
}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            **ANSWERING,
            "messages": [
                *MESSAGES,
                {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "5"}]},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "chat_template_kwargs": {"dim": True},
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    (CHAT, {**ANSWERING, "messages": MESSAGES, "response_format": FORM}),
    (
        CHAT,
        {
            "messages": MESSAGES,
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (COMPLETIONS, {**ANSWERING, "prompt": "abc", "echo": True, "logprobs": 2, "suffix": ""}),
    (COMPLETIONS, {"prompt": [[9, 10], [11]], "max_tokens": 2, "ignore_eos": True}),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": True}),
    ("/tokenize", {"prompt": "abc", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [9, 10]}),
]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """Of a tokenizer that begins texts with a special token."""
    tokenizer = byte_tokenizer()
    begins = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 2)])
    tokenizer.backend_tokenizer.post_processor = begins
    tokenizer.chat_template = TEMPLATE
    return Decoder(byte_target(tokenizer))


@pytest.fixture(scope="module")
def client(decoder: Decoder) -> Iterator[TestClient]:
    app = make_app(decoder, ServerOptions("tiny"))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def refusal(client: TestClient, path: str, body: Any) -> dict[str, Any] | None:
    """The error of a request; None for an answer. Neither is a failure of the server."""
    headers = {"Content-Type": "application/json"}
    response = client.post(path, content=json.dumps(body), headers=headers)
    error = None
    if response.status_code != 200:
        error = response.json()["error"]
        assert 400 <= response.status_code < 500, (body, error)
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert isinstance(error["code"], str | None)
    else:
        assert '"server_error"' not in response.text
    return error


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each object or list in a value with each of its keys."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


VALUES: list[Any] = [
    None, True, -1, 0, 5, 2**31, 2**64, -(2**70), 10**400, 0.5, -0.5, 1e-320, 1e300, float("nan"),
    float("inf"), "", "5", "null", "\ud83d", "a\udc00b", "{", "[" * 2000, "<|end|>", [], [[]], {},
    [None], [5, "a"], {"a": None}, {"\ud83d": 1}, [{"type": "image_url"}], {"type": "text"},
    {"$ref": "#"}, {"type": "object", "properties": 5}, {"not": {}}, "auto", "required",
]  # fmt: skip
ODD = st.one_of(
    st.sampled_from(VALUES),
    st.integers(1, 80).map(lambda depth: json.loads("[" * depth + "]" * depth)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
)


@pytest.mark.parametrize("number", range(len(BODIES)))
@settings(
    max_examples=30, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(data=st.data())
def test_no_body_is_a_failure_of_the_server(client, number, data) -> None:
    path, body = BODIES[number]
    body = deepcopy(body)
    for _ in range(data.draw(st.integers(1, 2))):
        found = [*places(body)]
        where, key = found[data.draw(st.integers(0, len(found) - 1))]
        action = data.draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if action == "remove" or (action == "add" and isinstance(where, list)):
            del where[key]
        else:
            key = data.draw(st.text(max_size=5)) if action == "add" else key
            where[key] = deepcopy(data.draw(ODD))
        if not body:
            break
    refusal(client, path, body)


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_whole_bodies_are_answered_and_nulls_count_as_nothing(client, number) -> None:
    path, body = BODIES[number]
    assert refusal(client, path, body) is None
    needed = {"messages", "prompt", "tokens"}
    nulls = {name: value if name in needed else None for name, value in body.items()}
    assert refusal(client, path, {**nulls, "unheard_of": None}) is None


def test_bodies_that_are_nested_too_deep_for_python_are_refused(client) -> None:
    for body in ("[" * 100_000, '{"messages":' + "[" * 5000 + "]" * 5000 + "}", "1" * 5000):
        response = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and response.json()["error"]["message"]


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_fields_that_nobody_knows_are_refused_by_name_at_every_depth(client, number) -> None:
    path, body = BODIES[number]
    for place in range(len([*places(body)])):
        changed = deepcopy(body)
        where, _ = [*places(changed)][place]
        if isinstance(where, dict) and not is_free(changed, where):
            where["unheard_of"] = 1
            error = refusal(client, path, changed)
            assert error is not None and error["param"].endswith("unheard_of"), changed


def is_free(body: dict[str, Any], inside: Any) -> bool:
    """Whether an object is one in which a client may name anything, or a part of one."""
    free = ("logit_bias", "chat_template_kwargs", "schema", "parameters")
    objects = [where[key] for where, key in places(body) if key in free]
    return any(inside is each or any(inside is w for w, _ in places(each)) for each in objects)


def test_no_seed_is_any_seed(client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8, "seed": -1, "temperature": 1.0}
    assert (
        len(
            {
                client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
                for _ in range(4)
            }
        )
        > 1
    )


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "role": (CHAT, {"messages": [{"content": "a"}]}, "messages.0.role: Field required"),
    "schema": (CHAT, {"response_format": {**FORM, "json_schema": {}}}, "with a schema"),
    "both": (CHAT, {"response_format": {**FORM, "type": "json_object"}}, "with a schema"),
    "circle": (
        CHAT,
        {"response_format": {**FORM, "json_schema": {"schema": {"$ref": "#"}}}},
        "no text has this form",
    ),
    "top": (CHAT, {"top_logprobs": 2}, "top_logprobs need logprobs"),
    "usage": (CHAT, {"stream_options": {"include_usage": True}}, "stream_options need stream"),
    "again": (CHAT, {"add_generation_prompt": False}, "opposite of continue_final_message"),
    "part": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "at": 5}]}]},
        "messages.0.at is not supported",
    ),
    "text and chat": ("/tokenize", {"prompt": "a"}, "do not go with messages"),
    "model": ("/tokenize", {"model": "other"}, "there is no model other"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(client, name) -> None:
    path, fields, sentence = WRONG[name]
    error = refusal(client, path, {"messages": MESSAGES, **fields})
    assert error is not None and sentence in error["message"]


@pytest.mark.parametrize("token", [-1, 260, 2**40, 2**70])
def test_a_token_that_the_model_lacks_is_named_in_every_field(client, token) -> None:
    for path, fields in (
        ("/detokenize", {"tokens": [9, token]}),
        (COMPLETIONS, {"prompt": [9, token]}),
        (COMPLETIONS, {"prompt": [[9], [token]]}),
        (COMPLETIONS, {"prompt": [9, token], "max_tokens": 0, "echo": True, "logprobs": 1}),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [token]}),
        (CHAT, {"messages": MESSAGES, "stop_token_ids": [token]}),
        (CHAT, {"messages": MESSAGES, "logit_bias": {str(token): 1}}),
    ):
        error = refusal(client, path, fields)
        assert error is not None and f"token {token} is not one of the 260" in error["message"]


def test_bytes_of_tokens_joined_are_the_text(client) -> None:
    """Though tokens are parts of characters."""
    forced = {str(token): 100 for token in client.app.state.server.tokenizer("é")["input_ids"][1:]}
    body = {"messages": MESSAGES, "max_tokens": 6, "logit_bias": forced, "logprobs": True}
    choice = client.post(CHAT, json={**body, "top_logprobs": 5}).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    joined = bytes(byte for each in entries for byte in each["bytes"])
    assert joined.decode(errors="replace") == choice["message"]["content"]
    assert {each["token"] for each in entries} <= {"bytes:\\xc3", "bytes:\\xa9"}
    body = {"prompt": "abc", "max_tokens": 3, "logprobs": 5}
    found = client.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]
    assert all(len(top) == 5 for top in found["top_logprobs"])


def test_a_form_beside_json_object_is_kept_to(client) -> None:
    form = {"type": "json_object", "schema": SCHEMA}
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 60, "response_format": form}
    found = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    assert found.startswith('{"a":')


def test_texts_are_read_without_special_tokens_where_asked(client, decoder) -> None:
    for added in (True, False):
        expected = decoder.tokenizer("abc", add_special_tokens=added)["input_ids"]
        body = {"prompt": "abc", "add_special_tokens": added}
        assert client.post("/tokenize", json=body).json()["tokens"] == expected
        body |= {"max_tokens": 1, "return_token_ids": True}
        choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
        assert choice["prompt_token_ids"] == expected


def test_pages_and_names_of_others_are_refused(client, decoder) -> None:
    """A name with a dot can be made to lead here; an address and a name without one cannot."""
    known = ("127.0.0.1:8000", "[::1]:8000", "localhost", "box:80", "192.168.1.7:9000")
    for host in known:
        for origin in ({}, {"Origin": f"http://{host}"}):
            assert client.get("/v1/models", headers={"Host": host, **origin}).status_code == 200
    for headers in (
        {"Host": "evil.example:8000"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Host": "localhost:8000", "Origin": "http://evil.example"},
        {"Host": "localhost:8000", "Origin": "null"},
    ):
        response = client.get("/metrics", headers=headers)
        assert response.status_code == 403 and "see --" in response.json()["error"]["message"]
    own = ServerOptions(
        "tiny",
        other_names=("org/tiny",),
        allowed_hosts=("a.example",),
        cors_origins=("http://b.example",),
    )
    with TestClient(make_app(Decoder(decoder.target), own)) as client:
        assert client.get("/v1/models/org/tiny").status_code == 200
        headers = {"Host": "A.example:80", "Origin": "http://b.example"}
        assert client.get("/v1/models", headers=headers).status_code == 200


def test_browsers_are_told_to_be_careful(client) -> None:
    page, other = client.get("/"), client.get("/nothing")
    for response in (page, other):
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
    assert "script-src 'sha256-" in page.headers["Content-Security-Policy"]
    assert client.get("/docs").status_code == 404


PIECES = """
const page = require("fs").readFileSync(0, "utf8");
const fenced = new Function(page.match(/function fenced[^]*?\\n}\\n/)[0] + "return fenced")();
const fence = { ticks: 0, code: false };
const all = ["a ``", "`py\\nx\\n`", "`` b `c` d"].flatMap((text) => fenced(text, fence));
console.log(all.filter(([, code]) => code).map(([text]) => text).join(""));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_code_on_the_page_has_a_font_of_its_own(client) -> None:
    """Its marks may come in pieces, and a single ` is none."""
    page = client.get("/").text
    assert ".code { font-family: ui-monospace" in page
    said = subprocess.run(["node", "-e", PIECES], input=page, capture_output=True, text=True)
    assert said.stdout == "`py\nx\n```\n", said.stderr


def test_models_can_be_asked_for_by_name_and_methods_are_named(client) -> None:
    assert client.get("/v1/models/tiny").json() == client.get("/v1/models").json()["data"][0]
    assert client.get("/v1/models/org/other").status_code == 404
    assert client.head("/health").status_code == client.head("/v1/models").status_code == 200
    refused = client.get(CHAT)
    assert refused.status_code == 405 and refused.headers["Allow"] == "POST"
    assert client.get("/v1/models/", follow_redirects=False).status_code == 404
    stream = client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2, "stream": True})
    assert stream.headers["Cache-Control"] == "no-cache"
    assert stream.headers["X-Accel-Buffering"] == "no"


def test_what_fails_is_told_in_openais_form(client, monkeypatch) -> None:
    monkeypatch.setattr("drafthead.serve.protocol.encode", lambda *_, **__: 1 / 0)
    response = client.post(CHAT, json={"messages": MESSAGES})
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"


def test_a_prompt_that_is_only_scored_decodes_nothing(client) -> None:
    def counted() -> list[str]:
        lines = client.get("/metrics").text.splitlines()
        return [line for line in lines if line.startswith("vllm:generation_tokens_total{")]

    before = counted()
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    assert client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "abc"
    assert counted() == before


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused(monkeypatch, key) -> None:
    with pytest.raises(UserError, match="API key is empty"):
        serve.main(model=None, drafting=None, serving=serve.Serving(), api_key=[key])  # type: ignore[arg-type]
    monkeypatch.setenv("DRAFTHEAD_API_KEY", "")
    with pytest.raises(UserError, match="API key is empty"):
        serve.main(model=None, drafting=None, serving=serve.Serving())  # type: ignore[arg-type]
    assert serve.is_loopback("127.0.0.1") and not serve.is_loopback("0.0.0.0")
