"""Two requests with different salts differ in nothing that can be observed but time."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serve_stream import events
from tiny import byte_target

from drafthead.core.trees.tree import Free
from drafthead.infer import Decoder
from drafthead.infer.drafters.store_lookup import Earlier, StoreLookup
from drafthead.serve.app import make_app
from drafthead.serve.decode_loop import REUSE_STEP, reported_reuse
from drafthead.serve.server_options import ServerOptions

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TEXT = "the code is 7341, and nobody else may know. " * 7  # longer than two steps
OTHER = "of the weather we know that it will be fine. " * 7
OWN = ("id", "created", "created_at", "item_id", "obfuscation")  # of one answer, whoever asks
PATHS = {
    CHAT: lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 24,
                        "return_token_ids": True, "return_drafted": True, "logprobs": True,
                        "top_logprobs": 3},
    COMPLETIONS: lambda text: {"prompt": text, "max_tokens": 24, "logprobs": 3,
                               "return_token_ids": True, "return_drafted": True},
    RESPONSES: lambda text: {"input": text, "max_output_tokens": 24},
}  # fmt: skip


@pytest.fixture
def client() -> Iterator[TestClient]:
    """Of a server that drafts from answers, in trees of one size: no clock chooses another."""
    target = byte_target(max_position_embeddings=2048)
    decoder = Decoder(target, StoreLookup(None, Earlier()), Free(12), adaptive=False)
    options = ServerOptions("tiny", api_keys=("one", "two"), max_batch=4)
    with TestClient(make_app(decoder, options)) as client:
        yield client


def ask(client: TestClient, path: str, text: str, key: str, salt: str, **fields: Any) -> list[Any]:
    """All that a client is sent: an answer, or the events of a stream."""
    body = {**PATHS[path](text), "temperature": 0, "cache_salt": salt, **fields}
    answer = client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return [stripped(answer.json())]
    return [stripped(event) for event in events(answer.text)]


def stripped(value: Any) -> Any:
    """A part of an answer without names and times of its own; numbers to what rounding leaves."""
    if isinstance(value, dict):
        return {name: stripped(each) for name, each in value.items() if name not in OWN}
    if isinstance(value, list):
        return [stripped(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("apart", [("one", "other"), ("two", "mine")], ids=["salt", "key"])
def test_no_field_of_an_answer_tells_what_others_have_asked(client, path, stream, apart) -> None:
    """Each answer is that of a text which nobody has asked for; the same client's is another."""
    fields = {"stream": True} if stream else {}
    if stream and path != RESPONSES:
        fields["stream_options"] = {"include_usage": True}
    unknown = ask(client, path, TEXT, "one", "first", **fields)
    for _ in range(2):
        known = ask(client, path, TEXT, "one", "mine", **fields)
    assert ask(client, path, TEXT, *apart, **fields) == unknown
    assert known != unknown, "else this test could not fail"
    assert json.dumps(known).count(f'"cached_tokens": {2 * REUSE_STEP}')


def test_what_is_told_of_a_prompt_depends_on_whole_steps_alone() -> None:
    """Whatever its length is: no single token that is known changes it."""
    for length in range(1, 4000, 7):
        for step in range(length // REUSE_STEP + 1):
            first = step * REUSE_STEP
            told = {
                # As `longest_of` decides: what is less than the least share is not reused.
                reported_reuse(known if 8 * known >= length else 0, length)
                for known in range(first, min(first + REUSE_STEP, length))
            }
            assert len(told) <= 1, (length, first, told)


def test_a_secret_is_not_found_digit_by_digit(client) -> None:
    """Without any salt: by a prompt whose length makes one token decide what is reused."""
    start = ("The minutes of the board, for its members alone. " * 5)[:200]
    ask(client, COMPLETIONS, start + "7341 is the code.", "one", "")
    found = set()
    for guess in "67":
        text = (start + guess).ljust(8 * len(start), "#")
        [answer] = ask(client, COMPLETIONS, text, "one", "", max_tokens=1)
        found.add(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert len(found) == 1
