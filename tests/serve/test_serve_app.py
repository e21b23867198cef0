"""The server answers as the decoder alone, in OpenAI's forms, and refuses what it cannot honour."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from serve_stream import events
from tiny import byte_target

from drafthead.core.errors import UserError
from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.request.options import read_options
from drafthead.scripts.serve import refuse_taken
from drafthead.serve.app import make_app
from drafthead.serve.server_options import ServerOptions

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(byte_target(), PromptLookup(3))


@pytest.fixture(scope="module")
def client(decoder: Decoder) -> Iterator[TestClient]:
    app = make_app(decoder, ServerOptions("tiny", max_batch=4, max_body=10_000))
    with TestClient(app) as client:
        yield client


def greedy(decoder: Decoder, prompt: Any, **options: Any) -> str:
    return decoder.generate(prompt, **options).texts[0]


def test_a_chat_is_answered_as_by_the_decoder_in_whole_and_in_pieces(client, decoder) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    expected = greedy(decoder, MESSAGES, max_new_tokens=20)
    whole = client.post(CHAT, json=body).json()
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": expected,
        "refusal": None,
    }
    assert whole["usage"]["completion_tokens"] == 20
    assert whole["choices"][0]["finish_reason"] == "length"
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    found = events(client.post(CHAT, json={**streamed, "return_drafted": True}).text)
    said = "".join(c["choices"][0]["delta"]["content"] for c in found if c["choices"])
    parts = [p for c in found if c["choices"] for p in c["choices"][0].get("drafted", ())]
    assert said == expected == "".join(part["text"] for part in parts)
    assert {part["drafted"] for part in parts} == {True, False}
    assert found[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert found[-1]["metrics"]["speculative_decoding"]["mean_acceptance_length"] > 1
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_request_chooses_what_drafts_for_it(client, path) -> None:
    """The text stays the same, and without drafts none is counted."""
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
    body |= {"temperature": 0, "max_tokens": 20}
    found = {
        str(draft): client.post(path, json={**body, "draft": draft}).json()
        for draft in (True, None, ["lookup"], [], False)
    }
    choices = [choice for each in found.values() for choice in each["choices"]]
    assert len({json.dumps([each.get("text"), each.get("message")]) for each in choices}) == 1
    drafted = [name for name, each in found.items() if "metrics" in each]
    assert drafted == ["True", "None", "['lookup']"]
    for wrong in (["head"], "lookup", 0, ["lookup", 5]):
        refused = client.post(path, json={**body, "draft": wrong})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("draft")
    assert (
        "draft head is not here: the drafters are lookup"
        in client.post(path, json={**body, "draft": ["head"]}).text
    )
    drawn = {**body, "temperature": 1, "draft": False}
    assert client.post(path, json={**drawn, "verifier": "match"}).status_code == 200
    error = client.post(path, json={**drawn, "verifier": "rejection"}).json()["error"]
    assert "with the rule rejection" in error["message"]


def test_what_is_counted_has_vllms_names(client) -> None:
    client.post(CHAT, json={"messages": MESSAGES, "temperature": 0, "max_tokens": 20})
    page = client.get("/metrics").text
    labels = '{engine="0",model_name="tiny"}'
    counts = {
        name: float(value)
        for name, value in (line.split(" ") for line in page.splitlines() if line[0] != "#")
    }
    assert counts[f"vllm:generation_tokens_total{labels}"] >= 20
    drafts = counts[f"vllm:spec_decode_num_drafts_total{labels}"]
    accepted = counts[f"vllm:spec_decode_num_accepted_tokens_total{labels}"]
    by_place = [value for name, value in counts.items() if "per_pos_total" in name]
    assert 0 < by_place[0] <= drafts and sum(by_place) == accepted
    assert counts[f"vllm:num_requests_running{labels}"] == 0
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert counts[f"vllm:{name}_seconds_count{labels}"] > 0


def test_a_completion_takes_texts_and_tokens_and_gives_logprobs(client, decoder) -> None:
    ids = [decoder.tokenizer(text)["input_ids"] for text in ("abc", "hello")]
    body = {"temperature": 0, "max_tokens": 6, "logprobs": 2}
    texts = client.post(COMPLETIONS, json={**body, "prompt": ["abc", "hello"]}).json()
    tokens = client.post(COMPLETIONS, json={**body, "prompt": ids}).json()
    assert [c["text"] for c in texts["choices"]] == [c["text"] for c in tokens["choices"]]
    for choice, prompt in zip(texts["choices"], ids, strict=True):
        alone = decoder.generate(prompt, max_new_tokens=6, logprobs=2)
        assert choice["text"] == alone.texts[0]
        found = choice["logprobs"]
        assert found["token_logprobs"] == pytest.approx(alone.logprobs[0].raw, abs=1e-4)
        places = found["text_offset"]
        assert places == sorted(places) and len(places) == len(found["tokens"]) == 6


def test_tokens_are_given_where_they_are_asked_for_and_special_ones_shown(client, decoder) -> None:
    """As `data distill --server` and `audit` ask."""
    prompt = decoder.tokenizer("hello")["input_ids"]
    end = decoder.tokenizer.eos_token_id
    alone = decoder.generate(prompt, max_new_tokens=6).sequences[0]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 6, "return_token_ids": True}
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, alone)
    found = events(client.post(COMPLETIONS, json={**body, "stream": True}).text)
    assert [token for c in found for token in c["choices"][0]["token_ids"]] == alone
    forced = {**body, "logit_bias": {str(end): 100}, "ignore_eos": True, "max_tokens": 2}
    shown = client.post(COMPLETIONS, json={**forced, "skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == decoder.tokenizer.decode([end, end])
    assert client.post(COMPLETIONS, json=forced).json()["choices"][0]["text"] == ""


def test_echoed_prompts_have_the_logprobs_of_a_plain_pass(client, decoder) -> None:
    [ids] = [decoder.tokenizer("hello world")["input_ids"]]
    body = {"prompt": "hello world", "echo": True, "logprobs": 1, "temperature": 0}
    logits = decoder.target.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    for limit in (0, 1):
        [choice] = client.post(COMPLETIONS, json={**body, "max_tokens": limit}).json()["choices"]
        found = choice["logprobs"]["token_logprobs"]
        assert found[0] is None and len(found) == len(ids) + limit
        assert found[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1 : len(ids)]]
        assert best == pytest.approx(logits[:-1].amax(1).tolist(), abs=1e-4)
        assert choice["text"].startswith("hello world") and choice["finish_reason"] == "length"


def test_a_prompt_of_the_whole_context_is_scored(client) -> None:
    """Nothing has to follow it; a longer one, and one of which a token should follow, are not."""
    body = {"echo": True, "logprobs": 0, "temperature": 0}
    whole = {**body, "prompt": [70, 71] * 128, "max_tokens": 0}
    found = client.post(COMPLETIONS, json=whole).json()["choices"][0]["logprobs"]
    part = client.post(COMPLETIONS, json={**whole, "prompt": [70, 71] * 9}).json()["choices"][0]
    scores = part["logprobs"]["token_logprobs"][1:]
    assert len(found["tokens"]) == 256
    assert found["token_logprobs"][1:18] == pytest.approx(scores, abs=1e-4)
    for other in ({"max_tokens": 1}, {"prompt": [70] * 257}):
        error = client.post(COMPLETIONS, json={**whole, **other}).json()["error"]
        assert error["code"] == "context_length_exceeded"
    assert client.post(COMPLETIONS, json={**whole, "prompt": [70, 999]}).status_code == 400


def test_samples_have_seeds_and_several_answers(client, decoder) -> None:
    body = {"messages": MESSAGES, "temperature": 0.8, "max_tokens": 8, "seed": 5, "n": 3}
    found = client.post(CHAT, json=body).json()
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] - 24
    for number, choice in enumerate(found["choices"]):
        options = {"max_new_tokens": 8, "temperature": 0.8, "seed": 5 + number}
        assert choice["index"] == number
        assert choice["message"]["content"] == greedy(decoder, MESSAGES, **options)
    biased = client.post(CHAT, json={**body, "n": 1, "temperature": 0, "logit_bias": {"70": 100}})
    assert len(set(biased.json()["choices"][0]["message"]["content"])) == 1


def test_an_answer_ends_before_its_stop_string(client, decoder) -> None:
    whole = greedy(decoder, MESSAGES, max_new_tokens=30)
    stop = whole[4:7]
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 30, "stop": [stop, "never"]}
    for streams in (False, True):
        response = client.post(CHAT, json={**body, "stream": streams})
        if streams:
            found = events(response.text)
            said = "".join(chunk["choices"][0]["delta"]["content"] for chunk in found)
            reason = found[-1]["choices"][0]["finish_reason"]
        else:
            [choice] = response.json()["choices"]
            said, reason = choice["message"]["content"], choice["finish_reason"]
        assert said == whole[: whole.index(stop)] and reason == "stop"


SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "kind": {"enum": ["a", "bb"]}},
    "required": ["on", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_json_is_as_asked_for_and_that_of_plain_decoding(client, decoder, temperature) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    body = {"messages": MESSAGES, "max_tokens": 60, "temperature": temperature, "seed": 3}
    plain = Decoder(decoder.target)
    with TestClient(make_app(plain, ServerOptions("tiny"))) as other:
        found = [
            each.post(CHAT, json={**body, "response_format": form}).json()
            for each in (client, other)
        ]
    assert found[0]["choices"] == found[1]["choices"]
    assert found[0]["choices"][0]["finish_reason"] == "stop"
    value = json.loads(found[0]["choices"][0]["message"]["content"])
    assert value["on"] in (True, False) and value["kind"] in ("a", "bb") and len(value) == 2
    # What the form demands is drafted, also where nothing else drafts.
    assert found[1]["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


REFUSED = {
    "guided": ({"guided_json": "[]"}, 400, "guided_json is a JSON schema"),
    "role": ({"messages": [{"role": "boss", "content": "a"}]}, 400, "messages.0.role is one of"),
    "least": ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens may not be above 8"),
    "long": ({"max_tokens": 1000}, 400, "context length is 256 tokens, but the prompt has 8"),
    "nothing": ({"max_tokens": 0}, 400, "max_tokens must be at least 1"),
    "heat": ({"temperature": -1}, 400, "temperature: "),
    "tools": (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "no place for tools",
    ),
    "no tool": ({"tools": [{"type": "function"}]}, 400, "tools.0.function: Field required"),
    "form": ({"response_format": {"type": "xml"}}, 400, "response_format is text"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "only texts are decoded",
    ),
    "body": ({"user": "x" * 20_000}, 413, "more than 10000 bytes"),
    "n": ({"n": 0}, 400, "n: "),
    "token": ({"logit_bias": {"5000": 1}}, 400, "token 5000 is not one of the 260 tokens"),
    "call": (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}, *MESSAGES]},
        400,
        "messages.0.tool_calls.0.function: Field required",
    ),
    "bias": ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_with_a_sentence(client, name) -> None:
    fields, status, sentence = REFUSED[name]
    response = client.post(CHAT, json={"messages": MESSAGES, "temperature": 1, **fields})
    assert response.status_code == status
    assert sentence in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "kind"), [("{", "application/json"), ("[]", "application/json"), ("{}", "text/plain")]
)
def test_a_body_that_is_no_json_object_is_named(client, body: str, kind: str) -> None:
    response = client.post(CHAT, content=body, headers={"Content-Type": kind})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("the body is no JSON object")


def test_an_address_that_is_taken_is_refused_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1 port {port} .*choose another --port"):
            refuse_taken("127.0.0.1", port)
    refuse_taken("127.0.0.1", 0)
    with pytest.raises(UserError, match="cannot listen at nowhere.invalid"):
        refuse_taken("nowhere.invalid", 8000)


def test_facts_tokens_and_the_page(client, decoder) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/health").status_code == 200
    tokens = client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    assert tokens == decoder.tokenizer("hello")["input_ids"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "hello"}
    chat = client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert chat == decoder.request(MESSAGES, read_options({})).prompts[0]
    page = client.get("/").text
    assert '{"model": "tiny", "key": false}' in page and "{/*" not in page


def test_a_key_is_asked_for_where_answers_are(decoder) -> None:
    options = ServerOptions(
        "tiny", api_keys=("other key", "secret"), cors_origins=("https://a.example",)
    )
    with TestClient(make_app(Decoder(decoder.target), options)) as client:
        for wrong in ({}, {"Authorization": "secret"}, {"Authorization": "Bearer other"}):
            refused = client.get("/v1/models", headers=wrong)
            assert refused.status_code == 401 and refused.headers["WWW-Authenticate"] == "Bearer"
        right = {"Authorization": "bearer secret", "Origin": "https://a.example"}
        response = client.get("/v1/models", headers=right)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert client.get("/health").status_code == client.get("/").status_code == 200


@pytest.mark.parametrize("kept", [True, False])
def test_a_conversation_that_goes_on_is_not_read_again(decoder, kept) -> None:
    """Nor is it told how much of a prompt others have sent, but in steps and to the same salt."""
    said = [{"role": "user", "content": "hello" * 30}]
    body = {"messages": said, "temperature": 0, "max_tokens": 12, "cache_salt": "mine"}
    options = ServerOptions("tiny", prefix_cache=kept)
    with TestClient(make_app(Decoder(decoder.target), options)) as client:
        first = client.post(CHAT, json=body).json()["choices"][0]["message"]
        longer = [*said, first, {"role": "user", "content": "more"}]
        expected = greedy(Decoder(decoder.target), longer, max_new_tokens=12)
        for salt, reused in (("other", 0), ("", 0), ("mine", 128 if kept else 0)):
            asked = {**body, "messages": longer, "cache_salt": salt}
            found = client.post(CHAT, json=asked).json()
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == reused
            assert found["choices"][0]["message"]["content"] == expected


def test_a_form_that_is_complete_ends_before_the_least_length(client) -> None:
    """Where it can go on it does."""
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "min_tokens": 9}
    for schema in ({"const": 1}, {"type": "integer"}):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        found = client.post(CHAT, json={**body, "response_format": form}).json()
        [choice] = found["choices"]
        if schema == {"const": 1}:
            assert (choice["message"]["content"], choice["finish_reason"]) == ("1", "stop")
        else:
            assert found["usage"]["completion_tokens"] >= 9


def test_rows_that_cannot_go_on_end_alone(client) -> None:
    """An object in itself without an end."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = {"messages": MESSAGES, "temperature": 0.7, "max_tokens": 20}
    failed = client.post(CHAT, json={**body, "response_format": form})
    assert failed.status_code == 400 and "response_format is too hard" in failed.text
    assert client.post(CHAT, json=body).status_code == 200


def test_a_client_that_goes_away_frees_its_row(decoder) -> None:
    """Whether it waits for a whole answer or reads a stream."""
    app = make_app(Decoder(decoder.target), ServerOptions("tiny", max_batch=1))
    server = app.state.server

    async def leave(stream: bool) -> None:
        body = {"messages": MESSAGES, "max_tokens": 200, "ignore_eos": True, "stream": stream}
        sent = [{"type": "http.request", "body": json.dumps(body).encode()}]
        started = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            while not server.loop.running:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            started.set()

        scope = {
            "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(),
            "query_string": b"", "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1", "scheme": "http", "root_path": "", "asgi": {"version": "3.0"},
        }  # fmt: skip
        await app(scope, receive, send)

    with TestClient(app) as client:
        for stream in (False, True):
            client.portal.call(leave, stream)
            ended = f'finished_reason="abort",model_name="tiny"}} {1.0 + stream}'
            deadline = time.monotonic() + 20
            while ended not in client.get("/metrics").text and time.monotonic() < deadline:
                time.sleep(0.01)
            assert ended in client.get("/metrics").text
            assert not server.loop.running
