"""What a body costs is bounded at every endpoint, whatever it is made of."""

import asyncio
import gc
import json
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tiny import byte_target

from drafthead.infer import Decoder
from drafthead.serve.app import make_app
from drafthead.serve.errors import ApiError
from drafthead.serve.items import ResponsesRequest  # noqa: F401  (a kind of body)
from drafthead.serve.limits import MOST_PARTS, Limits, counted
from drafthead.serve.protocol import Body, Fields
from drafthead.serve.server_options import ServerOptions

MANY = 300_000
MOST_SECONDS = 0.6  # in which nothing else goes on: of 4 MB of right JSON it is a tenth
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer secret"}


def listed(each: str, count: int = MANY) -> str:
    """A list of equal things."""
    return "[" + ",".join([each] * count) + "]"


FIELDS = ",".join(f'"k{n}":1' for n in range(MANY))
# What a field may hold, by what it is made of.
HELD = {
    "objects": listed("{}"),
    "lists": listed("[]"),
    "texts": listed('""'),
    "numbers": listed("1"),
    "nulls": listed("null"),
    "lists of numbers": listed("[1]", MOST_PARTS // 2),
    "fields": "{" + FIELDS + "}",
    "a deep list": "[" * MANY + "]" * MANY,
    "a text of quotes": '"' + '\\"' * MANY + '"',
    "a text of brackets": '"' + "[{" * MANY + '"',
    "a long number": "9" * MANY,
    "a number beyond floats": "1e999",
    "half of a character": '"\\ud800"',
}
# Fields that lists are looked for in, and one that nobody reads.
NAMES = (
    "prompt", "messages", "input", "tokens", "draft", "stop", "stop_token_ids", "logit_bias",
    "guided_choice", "tools", "metadata", "unheard_of",
)  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    options = ServerOptions("tiny", api_keys=("secret",))
    gc.freeze()  # as `listen` does: what other tests have made is no part of a server
    with TestClient(make_app(Decoder(byte_target()), options)) as client:
        yield client
    gc.unfreeze()


def paths(client: TestClient) -> list[str]:
    """All endpoints that take a body."""
    return [
        route.path for route in client.app.routes if "POST" in getattr(route, "methods", None) or ()
    ]


async def longest_pause(ended: asyncio.Event) -> float:
    """Most processor seconds in which the event loop does nothing else, until something ends.

    Seconds of a clock would count those in which the machine does something else.
    """
    longest, last = 0.0, time.process_time()
    while not ended.is_set():
        await asyncio.sleep(0.001)
        now = time.process_time()
        longest, last = max(longest, now - last), now
    return longest


@pytest.mark.parametrize("held", HELD)
def test_a_large_body_stops_nobody_and_is_answered_soon(client, held) -> None:
    """In the field that costs most at each endpoint: it is refused, or read without harm."""
    fields = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/tokenize": "tools",
              "/v1/responses": "input", "/detokenize": "tokens", "/v1/drafts": "draft"}  # fmt: skip
    assert sorted(fields) == sorted(paths(client))
    for path, name in fields.items():
        body = f'{{"{name}": {HELD[held]}}}'
        ended = asyncio.Event()
        watching = client.portal.start_task_soon(longest_pause, ended)
        began = time.process_time()
        response = client.post(path, content=body, headers=HEADERS)
        used = time.process_time() - began
        client.portal.call(ended.set)
        assert response.status_code == 400 and response.json()["error"]["message"], path
        assert len(response.content) < 1000, "the answer is short"
        assert used < 2 and watching.result() < MOST_SECONDS, (path, used)


@pytest.mark.parametrize("name", NAMES)
def test_each_field_of_wrong_elements_ends_at_the_first(client, name) -> None:
    base = {"prompt": "a", "max_tokens": 1}
    for each in ("1", "true", "1.5"):
        body = json.dumps({**base, name: None}).replace("null", listed(each))
        began = time.process_time()
        response = client.post("/v1/completions", content=body, headers=HEADERS)
        assert time.process_time() - began < 1
        assert response.status_code == 400


def kinds(kind: type[Fields] = Fields) -> Iterator[type[Fields]]:
    """All objects of which requests are made."""
    for each in kind.__subclasses__():
        yield each
        yield from kinds(each)


def lists_in(schema: Any) -> Iterator[dict[str, Any]]:
    """All lists that a schema of pydantic's core has."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        schema = [*schema.values()]
    for part in schema if isinstance(schema, list | tuple) else ():
        yield from lists_in(part)


def test_every_list_of_every_request_is_looked_at_up_to_what_is_wrong() -> None:
    found = {kind: [*lists_in(kind.__pydantic_core_schema__)] for kind in kinds()}
    assert Body in found and sum(map(len, found.values())) > 20
    for kind, lists in found.items():
        assert all(each.get("fail_fast") for each in lists), kind


@pytest.mark.parametrize(
    ("text", "outside"),
    [
        ('{"a": [1, "\\""]}', "{: [1, ]}"),
        ('["[\\\\", "{"]', "[, ]"),
        ('{"a\\\\\\"[": 5}', "{: 5}"),
        ("[1, 2]", "[1, 2]"),
    ],
)
def test_parts_are_counted_outside_of_texts(text, outside) -> None:
    json.loads(text)
    assert counted(text.encode()) == outside.encode()
    with pytest.raises(ApiError, match="at most"):
        counted(listed('"a"', MOST_PARTS + 1).encode())


def test_what_just_fits_is_answered(client) -> None:
    """A long conversation, and many prompts of tokens."""
    counted(json.dumps({"messages": [{"role": "user", "content": "a"}] * 6000}).encode())
    body = {"prompt": [[70] * 200] * 128, "max_tokens": 1, "temperature": 0}
    answer = client.post("/v1/completions", json=body, headers=HEADERS).json()
    assert len(answer["choices"]) == 128


def test_a_large_body_is_refused_before_this_process_reads_it(client, monkeypatch) -> None:
    """With the words of those that are read here; the process that reads it may end meanwhile."""
    large, own = client.app.state.server.large_bodies, Limits.given
    bodies = {HELD[name] for name in ("objects", "texts", "numbers", "a long number")}
    bodies |= {f'{{"stop": {listed("1")}}}', f'{{"prompt": "{"a b " * MANY}"}}'}
    expected = [client.post("/v1/completions", content=each, headers=HEADERS) for each in bodies]
    monkeypatch.setattr(Limits, "given", lambda *_: pytest.fail("read here"))
    for body, before in zip(bodies, expected, strict=True):
        found = client.post("/v1/completions", content=body, headers=HEADERS)
        assert found.status_code == 400 and found.json() == before.json()
    monkeypatch.setattr(Limits, "given", own)
    right = json.dumps({"prompt": "a", "user": "b" * 100_000, "max_tokens": 1})
    assert client.post("/v1/completions", content=right, headers=HEADERS).status_code == 200
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    found = client.post("/v1/completions", content=right, headers=HEADERS)
    assert found.status_code == 503 and "could not be read" in found.json()["error"]["message"]
    assert client.post("/v1/completions", content=right, headers=HEADERS).status_code == 200
    assert large.asked is not None
