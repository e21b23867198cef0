"""The lines of a server's log, what connections may keep others out, and the end of a server."""

import http.client
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from tiny import byte_target

from drafthead.infer import Decoder
from drafthead.scripts.serve import LogLines
from drafthead.serve import gate, listening
from drafthead.serve.app import make_app
from drafthead.serve.decode_loop import Scorings
from drafthead.serve.listening import Connection, Listening
from drafthead.serve.metrics import Metrics
from drafthead.serve.server_options import ServerOptions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
JSON = {"Content-Type": "application/json"}
FORGED = "FORGED 127.0.0.1 GET / 200"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(byte_target(eos_token_id=None, max_position_embeddings=4096))


@contextmanager
def served(decoder: Decoder, grace: float = 0.1) -> Iterator[tuple[Listening, int]]:
    """A server in a thread, and its port; it ends with the block."""
    app = make_app(decoder, ServerOptions("tiny", max_batch=2, drafts=("lookup",)))
    config = uvicorn.Config(
        app, port=0, http=Connection, log_config=None, access_log=False,
        timeout_graceful_shutdown=30,
    )  # fmt: skip
    server = Listening(config, grace, app.state.server)
    thread = Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def asks(port: int, **fields: Any) -> http.client.HTTPResponse:
    """The response to a request, of which nothing is read yet."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = {"messages": MESSAGES, "max_tokens": 2, **fields}
    line.request("POST", CHAT, json.dumps(body), JSON)
    return line.getresponse()


# ---- the log -------------------------------------------------------------------------------------

LINES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "an answer": ("POST", COMPLETIONS, {"json": {"prompt": "ab", "max_tokens": 3}},
                  r"POST /v1/completions 200 in \d+\.\d\d s, \w{32}, 2 \+ 3 tokens, 0 of 0 drafts"),
    "a wrong field": ("POST", COMPLETIONS, {"json": {"prompt": "a", "best_of": 2}},
                      r"POST \S+ 400 in .*: best_of is not supported by this server: leave it out"),
    "no JSON": ("POST", CHAT, {"content": "{", "headers": JSON},
                r"POST \S+ 400 in .*: the body is no JSON object: .*"),
    "no such page": ("GET", "/nothing", {}, r"GET /nothing 404 in .*: Not Found"),
    "a method": ("GET", CHAT, {}, r"GET /v1/chat/completions 405 in .*: Method Not Allowed"),
    "a host": ("GET", "/health", {"headers": {"Host": "evil.example"}},
               r"GET /health 403 in .*: evil\.example is not a name .*"),
    "a name": ("GET", "/v1/models/x", {}, r"GET \S+ 404 in .*: there is no model x, only tiny"),
    "a broken name": ("GET", f"/v1/models/x%0a{FORGED}", {},
                      r"GET /v1/models/x%0AFORGED%20127\S+ 404 in .*: Not Found"),
    "a terminal's name": ("GET", "/v1/models/%1b%5b2J%c2%9b2J", {},
                          r"GET /v1/models/%1B%5B2J%C2%9B2J 404 in .*\\x1b\[2J\\x9b2J, only tiny"),
    "a broken field": ("POST", COMPLETIONS, {"json": {"prompt": "a", f"x\n{FORGED}": 1}},
                       r"POST \S+ 400 in .*: x\\nFORGED .* is not supported .*"),
    "a broken draft": ("POST", COMPLETIONS, {"json": {"prompt": "a", "draft": [f"\r{FORGED}"]}},
                       r"POST \S+ 400 in .*: draft \\rFORGED .*"),
    "an id": ("GET", "/nothing", {"headers": {"X-Request-Id": "a b"}}, r"GET .* \w{32}: Not Found"),
    "an own id": ("GET", "/nothing", {"headers": {"X-Request-Id": "mine-1"}}, r"GET .* mine-1: .*"),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_a_request_has_one_line_that_is_the_servers_own(decoder, caplog, name) -> None:
    method, path, sent, line = LINES[name]
    caplog.set_level(logging.INFO, "drafthead.serve.gate")
    with TestClient(make_app(decoder, ServerOptions("tiny"))) as client:
        id = client.request(method, path, **sent).headers["X-Request-Id"]
        client.get("/health")
    form = LogLines("%(asctime)s %(message)s")
    [written] = [form.format(record) for record in caplog.records if record.name == gate.__name__]
    at = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z testclient "
    assert re.fullmatch(at + line, written) and id in written, written


def test_the_first_line_tells_what_is_served_and_the_last_what_was_broken_off(
    decoder, caplog
) -> None:
    caplog.set_level(logging.INFO, "drafthead.serve")
    with served(decoder) as (server, port):
        stream = asks(port, stream=True, max_tokens=3000)
        whole = Future[int]()
        Thread(target=lambda: whole.set_result(asks(port, max_tokens=3000).status)).start()
        while not stream.peek():
            time.sleep(0.01)
        server.should_exit = True
        events = stream.read().decode().split("\n\n")  # to the end of the last chunk
        assert whole.result(20) == 503
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "has ended before the answer" in error["message"]
    first, last = caplog.messages[0], [each for each in caplog.messages if "broken off" in each]
    facts = "serves tiny (LlamaForCausalLM, no drafter, float32 on cpu), drafted by lookup, in a"
    assert facts in first and f"context of 4096 tokens at http://127.0.0.1:{port}" in first
    assert last == ["the server ends: 2 answers are broken off"]
    assert not any(record.exc_info for record in caplog.records)


def test_those_whose_prompts_are_scored_are_told_of_the_end(decoder, monkeypatch) -> None:
    monkeypatch.setattr(Scorings, "turn", lambda _: time.sleep(0.01) or [])
    body = {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1, "stream": True}
    with served(decoder) as (server, port):
        lines = [http.client.HTTPConnection("127.0.0.1", port, timeout=20) for _ in range(2)]
        for line in lines:
            line.request("POST", COMPLETIONS, json.dumps(body), JSON)
        streams, loop = [line.getresponse() for line in lines], server.server.loop
        while not (loop.scorings.count and loop.scoring.waiting):
            time.sleep(0.01)
        server.should_exit = True
        for stream in streams:
            [event] = stream.read().decode().split("\n\n")[:-1]
            error = json.loads(event.removeprefix("data: "))["error"]
            assert "has ended before the answer" in error["message"]


def test_what_fails_has_a_line_an_id_and_a_traceback(decoder, caplog, monkeypatch) -> None:
    monkeypatch.setattr("drafthead.serve.protocol.encode", lambda *_, **__: 1 / 0)
    caplog.set_level(logging.INFO)
    with served(decoder) as (_, port):
        response = asks(port)
        error = json.loads(response.read())["error"]
    assert response.status == 500 and error["message"] == "the server failed: ZeroDivisionError"
    headers = {name: response.headers[name] for name in gate.CAREFUL}
    assert headers == gate.CAREFUL
    [line] = [each.getMessage() for each in caplog.records if each.name == gate.__name__]
    end = f"{response.headers['X-Request-Id']}: the server failed: ZeroDivisionError"
    assert re.fullmatch(rf"\S+ POST {CHAT} 500 in \S+ s, {end}", line)
    [failed] = [each.exc_info for each in caplog.records if each.levelno >= logging.ERROR]
    assert failed is not None and failed[0] is ZeroDivisionError


def test_what_drafts_is_logged_when_it_changes(decoder, caplog) -> None:
    caplog.set_level(logging.INFO, "drafthead.serve.app")
    options = ServerOptions("tiny", api_keys=("one",), admin_keys=("admin",), drafts=("lookup",))
    with TestClient(make_app(Decoder(decoder.target), options)) as client:
        answers = [
            client.request(method, "/v1/drafts", json={"draft": ["answers"]},
                           headers={"Authorization": f"Bearer {key}"}).json()
            for method, key in (
                ("GET", "admin"), ("POST", "admin"), ("GET", "admin"), ("GET", "one")
            )
        ]  # fmt: skip
    assert [answer.get("draft") for answer in answers] == [["lookup"], *2 * [["answers"]], None]
    assert answers[1]["drafters"] == ["answers"] and "error" in answers[3]
    assert "answers are drafted by answers from now on" in caplog.messages


# ---- connections ---------------------------------------------------------------------------------


def opened(port: int, sent: bytes) -> socket.socket:
    """A connection that has sent something."""
    line = socket.create_connection(("127.0.0.1", port), timeout=20)
    line.sendall(sent)
    return line


def at_once(count: int, work: Callable[[], Any]) -> list[Any]:
    """What some work returns that many threads do at a time."""
    with ThreadPoolExecutor(count) as threads:
        return [each.result() for each in [threads.submit(work) for _ in range(count)]]


def is_closed(line: socket.socket) -> bool:
    """Whether the server closes a connection soon, all of whose answers are read here."""
    try:
        while line.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Le"
NO_BODY = HALF + b"ngth: 50\r\nContent-Type: application/json\r\n\r\n{"
# By what connections are held that answer nothing.
SILENT = {
    "nothing": b"", "half of the headers": HALF, "half of a body": NO_BODY,
    "chunks without an end": HALF[:-10] + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    "reading nothing": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
}  # fmt: skip


@pytest.mark.parametrize("silent", SILENT)
def test_connections_that_are_silent_keep_nobody_out(decoder, monkeypatch, silent) -> None:
    monkeypatch.setattr(Connection, "most", 5)
    monkeypatch.setattr(listening, "MOMENT", 0.05)
    monkeypatch.setattr(Metrics, "page", lambda _: bytes(1 << 20))
    with served(decoder) as (_, port):
        assert [each.status for each in at_once(7, lambda: asks(port))] == [200] * 7
        lines = []
        for _ in range(12):
            lines.append(opened(port, SILENT[silent]))
            time.sleep(0.01)
        time.sleep(0.3)
        assert asks(port).status == 200
        assert is_closed(lines[0]), "the oldest are closed"
        monkeypatch.setattr(listening, "HEADER_SECONDS", 0.2)
        monkeypatch.setattr(gate, "BODY_SECONDS", 0.2)
        late = opened(port, SILENT[silent])
        time.sleep(0.7)
        assert is_closed(late) and asks(port).status == 200
        for line in [*lines, late]:
            line.close()


def test_connections_of_an_address_are_read_in_a_pace() -> None:
    pace, step = listening.Pace(), 1 / listening.A_SECOND
    longest = listening.HEADER_SECONDS
    assert [pace.wait("a", 0.0) for _ in range(listening.AT_ONCE)] == [0.0] * listening.AT_ONCE
    waits = [pace.wait("a", 0.0) for _ in range(2000)]
    assert waits[:2] == pytest.approx([step, 2 * step])
    assert waits[-1] == pytest.approx(longest), "those that would wait longer are not counted"
    assert pace.wait("b", 0.0) == 0, "other addresses do not wait"
    assert pace.wait("a", 2.0) == pytest.approx(waits[-1] - 2 + step, abs=step)
    assert pace.wait("a", 2 * longest) == 0
    for _ in range(10 * listening.AT_ONCE):  # ever new connections that are answered
        assert pace.wait("a", 2 * longest) == 0
        pace.take_out("a")
    for address in range(listening.MOST_CONNECTIONS + 2):
        pace.wait(str(address), 100.0 + address)
    assert len(pace.empty_at) < 5, "addresses without connections are forgotten"


def test_many_connections_of_an_address_are_answered_later(decoder, monkeypatch) -> None:
    monkeypatch.setattr(Connection, "pace", listening.Pace())
    monkeypatch.setattr(listening, "AT_ONCE", 2)
    monkeypatch.setattr(listening, "A_SECOND", 4)
    with served(decoder) as (_, port):  # which has asked once
        began = time.monotonic()
        assert [each.status for each in at_once(5, lambda: asks(port))] == [200] * 5
        assert 0.7 < time.monotonic() - began < 5
        monkeypatch.setattr(listening, "HEADER_SECONDS", 0.1)
        lines = [opened(port, b"") for _ in range(3)]
        assert is_closed(lines[-1])
        for line in lines:
            line.close()


def test_a_body_that_does_not_come_is_answered(decoder, monkeypatch) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.2)
    with served(decoder) as (_, port):
        late = opened(port, NO_BODY)
        assert b" 408 " in late.recv(100)
        late.close()


def test_headers_without_an_end_are_not_kept(decoder) -> None:
    with served(decoder) as (_, port):
        line = opened(port, HALF[:-10] + b"x: " + b"y" * (1 << 17))
        assert b" 400 " in line.recv(100) and is_closed(line)
        line.close()
