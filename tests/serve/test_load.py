"""What one request costs is bounded, and what fails in one does not reach the others."""

import json
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tiny import byte_target

from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.scheduling.running_rows import RunningRows
from drafthead.infer.timing.plans import MOST_PLANS, StepKind
from drafthead.serve import json_grammar
from drafthead.serve.answer_text import AnswerText
from drafthead.serve.app import make_app
from drafthead.serve.decode_loop import Inbox
from drafthead.serve.limits import MOST_BIASES, MOST_STOP_CHARACTERS, MOST_STOPS
from drafthead.serve.protocol import ChatRequest
from drafthead.serve.server_options import ServerOptions

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(byte_target())


@pytest.fixture(scope="module")
def client(decoder: Decoder) -> Iterator[TestClient]:
    with TestClient(make_app(decoder, ServerOptions("tiny", max_batch=4))) as client:
        yield client


COSTLY: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompts": (COMPLETIONS, {"prompt": ["a"] * 129}, "128 answers at most"),
    "answers": (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "128 answers at most"),
    "text": (COMPLETIONS, {"prompt": "a" * 256 * 20}, "prompt cannot fit"),
    "tokens": (COMPLETIONS, {"prompt": [70] * 257}, "prompt cannot fit"),
    "messages": (CHAT, {"messages": MESSAGES * 257}, "messages cannot fit"),
    "message": (CHAT, {"messages": [{**MESSAGES[0], "content": "a" * 6000}]}, "cannot fit"),
    "tools": (CHAT, {"messages": MESSAGES, "tools": ["a" * 6000]}, "messages cannot fit"),
    "stops": (CHAT, {"messages": MESSAGES, "stop": ["a"] * (MOST_STOPS + 1)}, "stop may have"),
    "stop": (CHAT, {"messages": MESSAGES, "stop": "a" * (MOST_STOP_CHARACTERS + 1)}, "stop may"),
    "bias": (
        CHAT,
        {"messages": MESSAGES, "logit_bias": {str(n): 1 for n in range(MOST_BIASES + 1)}},
        "logit_bias may have",
    ),
    "to tokenise": ("/tokenize", {"prompt": "a" * 6000}, "prompt cannot fit"),
    "to decode": ("/detokenize", {"tokens": [70] * 257}, "tokens cannot fit"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_costs_too_much_is_refused_before_it_is_tokenised(client, monkeypatch, name) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was tokenised")

    tokenizer = client.app.state.server.tokenizer
    monkeypatch.setattr(type(tokenizer), "__call__", never)
    monkeypatch.setattr(type(tokenizer), "decode", never)
    path, body, sentence = COSTLY[name]
    response = client.post(path, json=body)
    assert response.status_code == 400 and sentence in response.json()["error"]["message"]


def test_a_schema_that_takes_too_long_to_compile_is_refused_and_others_are_not(
    client, monkeypatch
) -> None:
    def ask(schema: dict[str, Any]) -> Any:
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        body = {"messages": MESSAGES, "temperature": 0, "response_format": form}
        return client.post(CHAT, json={**body, "max_tokens": 20})

    assert ask({"const": 7}).json()["choices"][0]["message"]["content"] == "7"
    monkeypatch.setattr(json_grammar, "TRIAL_SECONDS", 0.2)
    began = time.monotonic()
    refused = ask({"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]})
    assert time.monotonic() - began < 5
    assert refused.status_code == 400 and "to compile" in refused.json()["error"]["message"]
    monkeypatch.setattr(json_grammar, "TRIAL_SECONDS", 20.0)
    assert ask({"const": 8}).json()["choices"][0]["message"]["content"] == "8"
    process = client.app.state.server.reader.grammars.trial.process
    assert ask({"const": 9}).status_code == 200
    assert client.app.state.server.reader.grammars.trial.process is process
    process.kill()
    process.wait()
    assert ask({"const": 10}).status_code == 200


def test_prompts_are_scored_in_turns_and_no_more_than_may_wait(decoder, monkeypatch) -> None:
    monkeypatch.setattr("drafthead.infer.answers.score_record.SCORED", 8)
    with TestClient(make_app(decoder, ServerOptions("tiny"))) as client:
        loop = client.app.state.server.loop
        turns: list[str] = []
        turn = loop.scorings.turn
        monkeypatch.setattr(loop.scorings, "turn", lambda: (turns.append("scored"), turn())[1])
        body = {"prompt": "abc" * 20, "max_tokens": 0, "echo": True, "logprobs": 1}
        found = client.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]
        assert len(turns) == 9 and len(found["token_logprobs"]) == 60
        whole = client.post(COMPLETIONS, json={**body, "prompt": "abc" * 2}).json()
        short = whole["choices"][0]["logprobs"]["token_logprobs"]
        assert found["token_logprobs"][1:6] == pytest.approx(short[1:], abs=1e-4)


def once(monkeypatch: Any, owner: type, name: str, error: BaseException) -> None:
    """Let a method raise once."""
    method, left = getattr(owner, name), [error]

    def or_raise(*given: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return method(*given, **named)

    monkeypatch.setattr(owner, name, or_raise)


FAULTS: dict[str, tuple[type, str, BaseException]] = {
    "a row": (RunningRows, "admit", ValueError("broken")),
    "a text": (AnswerText, "show", ValueError("broken")),
    "a token's text": (AnswerText, "__call__", ValueError("broken")),
    "a step": (RunningRows, "step", ValueError("broken")),
    "the thread": (RunningRows, "step", SystemExit("broken")),
    "memory": (RunningRows, "step", MemoryError()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_ends_its_answer_and_the_next_is_answered(decoder, monkeypatch, name) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    with TestClient(make_app(decoder, ServerOptions("tiny", max_batch=4))) as client:
        right = client.post(CHAT, json=body).json()["choices"]
        once(monkeypatch, *FAULTS[name])
        failed = client.post(CHAT, json=body)
        assert failed.status_code == 500 and "decoding failed" in failed.text
        assert client.post(CHAT, json=body).json()["choices"] == right
        assert client.get("/health").status_code == 200
        loop = client.app.state.server.loop
        assert not loop.running and loop.rows.count == 0
        assert 'finished_reason="error",model_name="tiny"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize("name", ["a row", "a text", "a token's text"])
def test_a_failure_leaves_the_others_alone(decoder, monkeypatch, name) -> None:
    """Ten answers run when one of them fails; the others are those of a quiet server."""
    body = {"messages": MESSAGES, "max_tokens": 12, "ignore_eos": True, "temperature": 0.9}
    with TestClient(make_app(decoder, ServerOptions("tiny", max_batch=10))) as client:
        right = [client.post(CHAT, json={**body, "seed": n}).json()["choices"] for n in range(10)]
        once(monkeypatch, *FAULTS[name])
        found: dict[int, Any] = {}

        def ask(number: int) -> None:
            found[number] = client.post(CHAT, json={**body, "seed": number})

        threads = [Thread(target=ask, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    failed = [number for number in found if found[number].status_code != 200]
    assert len(failed) == 1
    for number in found.keys() - failed:
        assert found[number].json()["choices"] == right[number]


def test_nothing_is_taken_where_nobody_decodes(decoder) -> None:
    with TestClient(make_app(decoder, ServerOptions("tiny"))) as client:
        client.app.state.server.loop.stop()
        body = {"messages": MESSAGES, "max_tokens": 2}
        assert client.post(CHAT, json=body).status_code == 503
        assert client.get("/health").status_code == 503


def test_an_answer_that_is_given_up_while_it_waits_is_counted(decoder) -> None:
    with TestClient(make_app(decoder, ServerOptions("tiny", max_batch=1))) as client:
        server = client.app.state.server
        asked = json.dumps({"messages": MESSAGES, "max_tokens": 3}).encode()
        assert client.post(CHAT, content=asked, headers=JSON).status_code == 200

        async def waits() -> None:
            chat = ChatRequest(messages=MESSAGES, max_tokens=3)
            jobs = [*server.reader.jobs(chat, Inbox()), *server.reader.jobs(chat, Inbox())]
            server.loop.line.spare = 0
            server.loop.submit(jobs)
            server.loop.cancel(jobs[1:])  # before the thread can be done with the first

        client.portal.call(waits)
        assert 'finished_reason="abort",model_name="tiny"} 1.0' in client.get("/metrics").text


JSON = {"Content-Type": "application/json"}


def test_plans_of_ever_new_temperatures_are_forgotten(decoder) -> None:
    plans = Decoder(decoder.target, PromptLookup(8), adaptive=True).plans
    kind = StepKind("match", 1, filters=False, processors=False)
    first = plans.plan(kind, 0.1)
    for number in range(3 * MOST_PLANS):
        plans.plan(kind, 0.1 * number)
        assert plans.plan(kind, 0.1) is first, "what is asked for again is kept"
    assert len(plans.plans) == MOST_PLANS


def test_a_token_costs_the_same_in_a_long_answer(decoder) -> None:
    """Counted, not timed: how often marks of tokens are looked at."""

    class Places(list):
        looks = 0

        def __getitem__(self, place: Any) -> Any:
            Places.looks += 1
            return super().__getitem__(place)

    text = AnswerText(decoder.tokenizer, ["never"])
    text.places = Places()
    for number in range(300):
        text(70 + number % 20)
        text.show([number % 2 == 0], ended=False)
    assert 0 < Places.looks <= 600
