"""Who waits is bounded, let go, and served in turn with others, whatever the work is."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from tiny import byte_target

from drafthead.infer import Decoder
from drafthead.serve.app import make_app
from drafthead.serve.decode_loop import spare_rows
from drafthead.serve.errors import ApiError
from drafthead.serve.json_grammar import JsonGrammars
from drafthead.serve.server_options import ServerOptions
from drafthead.serve.waiting import Line, Queue, Threads, Visit

COMPLETIONS, DRAFTS = "/v1/completions", "/v1/drafts"
KEY = "Bearer secret"
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 2, "temperature": 0}
# A request of each kind of work, and the line that it waits in.
KINDS: dict[str, tuple[str, dict[str, Any], Callable[[Any], Line]]] = {
    "reading": (COMPLETIONS, SHORT, lambda server: server.reading),
    "forming": (COMPLETIONS, {**SHORT, "guided_regex": "a|b"}, lambda server: server.forming),
    "decoding": (COMPLETIONS, SHORT, lambda server: server.loop.line),
    "scoring": (
        COMPLETIONS,
        {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1},
        lambda server: server.loop.scoring,
    ),
    "loading": (DRAFTS, {"draft": ["lookup"]}, lambda server: server.loading),
}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(byte_target())


@pytest.fixture
def client(decoder: Decoder) -> Iterator[TestClient]:
    options = ServerOptions("tiny", api_keys=("secret",), max_batch=2, max_queue=3, drafts_from=())
    with TestClient(make_app(Decoder(decoder.target), options)) as client:
        client.headers["Authorization"] = KEY
        yield client


async def asked(
    app: FastAPI,
    path: str,
    body: dict[str, Any],
    leaves: Callable[[], Awaitable[Any]],
    address: str = "1.2.3.4",
) -> list[int]:
    """The statuses that a client is sent who goes away when `leaves` returns."""
    sent, statuses = [{"type": "http.request", "body": json.dumps(body).encode()}], list[int]()

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await leaves()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    headers = {"content-type": "application/json", "authorization": KEY}
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers":
        [(name.encode(), value.encode()) for name, value in headers.items()], "query_string": b"",
        "http_version": "1.1", "scheme": "http", "root_path": "", "asgi": {"version": "3.0"},
        "client": (address, 5),
    }  # fmt: skip
    await app(scope, receive, send)
    return statuses


def holding(line: Line) -> list[Visit]:
    """Visits of others in all places of a line."""
    count = line.places + line.spare
    visits = [Visit(f"other {n}", 1, lambda: None, lambda _: None) for n in range(count)]
    line.inside.update(visits)
    return visits


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_of_each_kind_of_work_those_who_have_left_are_not_waited_for(client, kind) -> None:
    path, body, line_of = KINDS[kind]
    server = client.app.state.server
    line = line_of(server)

    async def leave() -> list[int]:
        others = holding(line)
        found = await asked(client.app, path, body, lambda: until(lambda: line.waiting))
        assert not line.waiting and server.queue.count == 0
        for each in others:
            line.leave(each)
        assert not line.inside
        return found

    assert client.portal.call(leave) == [499]
    headers = {"Authorization": KEY}
    assert client.post(path, json=body, headers=headers).status_code == 200


@pytest.mark.parametrize("kind", KINDS)
def test_of_each_kind_of_work_so_many_wait_and_so_long(client, kind) -> None:
    path, body, line_of = KINDS[kind]
    server = client.app.state.server
    line = line_of(server)
    client.portal.call(lambda: holding(line))
    server.queue.seconds = 0.05
    late = client.post(path, json=body)
    assert late.status_code == 503 and "no place was free" in late.text
    assert server.queue.count == 0
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1.0'
    assert (aborted in client.get("/metrics").text) == (kind == "decoding")
    server.queue.count = server.queue.most + 16  # of other kinds
    full = client.post(path, json=body)
    assert full.status_code == 429 and full.headers["Retry-After"] == "1"
    assert "queue holds 3" in full.json()["error"]["message"]


def test_forms_of_clients_that_have_gone_are_not_compiled(client, monkeypatch) -> None:
    made: list[str] = []

    def compiled(self: JsonGrammars, form: Any) -> Any:
        made.append(form.field)
        time.sleep(0.05)
        raise ApiError(400, "slow")

    monkeypatch.setattr(JsonGrammars, "compiled", compiled)
    server = client.app.state.server
    server.queue.most = 100
    path, body, _ = KINDS["forming"]

    async def leave() -> None:
        there = [asked(client.app, path, body, lambda: asyncio.sleep(0.02)) for _ in range(20)]
        await asyncio.gather(*there)

    client.portal.call(leave)
    assert client.post(path, json=body).status_code == 400
    assert len(made) <= 3


def test_a_request_with_several_answers_may_be_refused_as_a_whole(client) -> None:
    body = {**SHORT, "temperature": 0.5}
    never = client.post(COMPLETIONS, json={**body, "n": 6})
    assert never.status_code == 400 and "5 answers here, not 6" in never.text
    assert len(client.post(COMPLETIONS, json={**body, "n": 5}).json()["choices"]) == 5


def test_a_place_is_free_when_its_thread_is_though_the_client_has_left() -> None:
    async def leave() -> None:
        threads, begun, go = Threads(Queue(10, 1000), 1, "work"), list[str](), threading.Event()

        def work(client: str) -> None:
            begun.append(client)
            go.wait(10)

        working, waiting, last = (
            asyncio.create_task(threads.do(name, 1, lambda name=name: work(name)))
            for name in ("working", "waiting", "last")
        )
        await until(lambda: begun and len(threads.waiting) == 2)
        for each in (working, waiting):
            each.cancel()
        await asyncio.wait([working, waiting])
        assert [each.client for each in threads.inside] == ["working"], "its thread works"
        assert [each.client for each in threads.waiting] == ["last"]
        go.set()
        await last
        assert begun == ["working", "last"]
        assert not threads.inside and threads.queue.count == 0

    asyncio.run(leave())


# ---- fairness ------------------------------------------------------------------------------------


class Rows:
    """Rows that take turns as those of a processor do: a step takes longer with more of them."""

    def __init__(self, places: int, spare: int):
        self.line = Line(Queue(1000, 1000), places, spare)
        self.left: dict[Visit, int] = {}
        self.ended: dict[Visit, float] = {}
        self.now = 0.0

    def ask(self, client: str, tokens: int) -> Visit:
        visit = Visit(client, tokens, lambda: self.left.update({visit: tokens}), lambda _: None)
        self.line.enter([visit])
        return visit

    def step(self) -> None:
        self.now += 1 + 0.1 * (len(self.left) - 1)
        for visit in [*self.left]:
            self.left[visit] -= 1
            if not self.left[visit]:
                del self.left[visit]
                self.ended[visit] = self.now
                self.line.leave(visit)


def run_in_loop(work: Callable[[], Any]) -> Any:
    async def ran() -> Any:
        return work()

    return asyncio.run(ran())


@pytest.mark.parametrize("others", [1, 4])
def test_a_short_answer_waits_little_behind_forty_long_ones_of_another(others) -> None:
    """At most four times as long as it takes alone, also beside a few others like it."""

    def work() -> None:
        rows = Rows(16, spare_rows(16))
        for _ in range(40):
            rows.ask("long", 1500)
        for _ in range(100):
            rows.step()
        began = rows.now
        short = [rows.ask(f"short {number}", 16) for number in range(others)]
        while len(rows.ended) < others:
            rows.step()
        assert max(rows.ended[each] - began for each in short) <= 4 * 16

    run_in_loop(work)


def test_one_clients_forms_do_not_hold_up_anothers(decoder, monkeypatch) -> None:
    begun, both = list[str](), threading.Barrier(2)

    def refused(_: JsonGrammars, form: Any) -> Any:
        begun.append(str(form))
        if len(begun) <= 2:  # one at its own place, and one at that which is left for others
            both.wait(10)
        raise ApiError(400, "hard")

    monkeypatch.setattr(JsonGrammars, "compiled", refused)
    app = make_app(Decoder(decoder.target), ServerOptions("tiny", max_queue=100))
    with TestClient(app) as client:
        line = app.state.server.forming

        def ask(regex: str, address: str) -> asyncio.Task[list[int]]:
            body, stays = {**SHORT, "guided_regex": regex}, asyncio.Event()
            return asyncio.create_task(asked(app, COMPLETIONS, body, stays.wait, address))

        async def ask_all() -> None:
            others = holding(line)
            tasks = [ask(f"many{number}", "1.1.1.1") for number in range(20)]
            await until(lambda: len(line.waiting) == 20)
            tasks.append(ask("another", "2.2.2.2"))
            await until(lambda: len(line.waiting) == 21)
            for each in others:
                line.leave(each)
            assert await asyncio.gather(*tasks) == [[400]] * 21

        client.portal.call(ask_all)
    assert len(begun) == 21 and any("another" in each for each in begun[:2])


def test_clients_share_places_and_none_waits_for_ever() -> None:
    def work() -> None:
        rows = Rows(4, 1)
        many = [rows.ask("many", 30) for _ in range(20)]
        long = rows.ask("one", 200)
        for number in range(60):  # ever new clients with short work
            rows.ask(f"new {number}", 2)
        two = [rows.ask("two", 10) for _ in range(10)]
        inside = []
        while rows.line.waiting or rows.left:
            rows.step()
            inside.append([each.client for each in rows.line.inside])
        assert max(map(len, inside)) == 5, "the spare place is for clients without one"
        assert rows.ended[long] < rows.ended[many[-1]]
        assert rows.ended[two[-1]] < rows.ended[many[-1]], "ten are not behind twenty"
        assert not rows.line.had

    run_in_loop(work)


def test_who_stays_is_served_beside_those_who_come_again_and_again() -> None:
    """A second request, sent before the first has ended, where more clients wait than can begin."""

    def work() -> None:
        rows = Rows(4, 1)
        asked = {number: rows.ask(f"comes {number}", 10) for number in range(12)}
        stays: list[Visit] = []
        for _ in range(300):
            rows.step()
            for number, visit in asked.items():
                if visit in rows.ended:
                    asked[number] = rows.ask(f"comes {number}", 10)
            if len(stays) < 2 and (not stays or stays[0] in rows.left):
                stays.append(rows.ask("stays", 10))
        assert len(rows.ended) > 100
        assert rows.ended[stays[1]] < 2.5 * rows.ended[stays[0]]

    run_in_loop(work)


def test_of_one_clients_work_the_smallest_and_the_oldest_go_in_turn() -> None:
    def work() -> list[int]:
        line, begun = Line(Queue(10, 1000), 1), list[int]()
        first = Visit("a", 1, lambda: None, lambda _: None)
        line.enter([first])
        visits = {}
        for size in (9, 5, 7, 1):
            visits[size] = Visit("a", size, lambda size=size: begun.append(size), lambda _: None)
            line.enter([visits[size]])
        line.leave(first)
        while len(begun) < 4:
            line.leave(visits[begun[-1]])
        return begun

    assert run_in_loop(work) == [9, 1, 5, 7]


def test_nobody_is_let_in_before_a_group_of_places_is_free() -> None:
    def work() -> None:
        line, begun = Line(Queue(10, 1000), 4, least=2), list[int]()

        def visit(number: int) -> Visit:
            return Visit("a", 1, lambda: begun.append(number), lambda _: None)

        visits = [visit(number) for number in range(6)]
        line.enter(visits)
        assert begun == [0, 1, 2, 3]
        line.leave(visits[0])
        assert len(begun) == 4
        line.leave(visits[1])
        assert begun == [0, 1, 2, 3, 4, 5]

    run_in_loop(work)


def test_threads_that_read_are_not_the_event_loops(client, monkeypatch) -> None:
    names: list[str] = []
    limits = type(client.app.state.server.limits)
    read = limits.read
    monkeypatch.setattr(
        limits, "read",
        lambda *given: (names.append(threading.current_thread().name), read(*given))[1],
    )  # fmt: skip
    for path, body, _ in KINDS.values():
        assert client.post(path, json=body).status_code == 200
    assert len(names) == len(KINDS) and all(name.startswith("reading") for name in names)
