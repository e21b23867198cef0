"""The server answers as the decoder alone, in OpenAI's forms, and refuses what it cannot honour."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tiny import byte_tokenizer, tiny_llama

from drafthead.heads.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.serve.app import ServerOptions, make_app

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    model = tiny_llama(vocab_size=len(tokenizer), eos_token_id=end)
    return Decoder(Target(model, tokenizer), PromptLookup(3))


@pytest.fixture(scope="module")
def client(decoder: Decoder) -> Iterator[TestClient]:
    app = make_app(decoder, ServerOptions("tiny", max_batch=4, max_body=10_000))
    with TestClient(app) as client:
        yield client


def events(text: str) -> list[dict[str, Any]]:
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def greedy(decoder: Decoder, prompt: Any, **options: Any) -> str:
    return decoder.generate(prompt, **options).texts[0]


def test_a_chat_is_answered_as_by_the_decoder_in_whole_and_in_pieces(client, decoder) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    expected = greedy(decoder, MESSAGES, max_new_tokens=20)
    whole = client.post(CHAT, json=body).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected}
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
