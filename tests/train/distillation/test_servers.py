"""Several servers write the rows of one process, whichever of them come and go."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest
from completion_server import Completions, serving
from distilled import FakeDecoder, asked
from tiny import tiny_llama

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer.serving import ServeRequest
from drafthead.train.distillation import connection as connection_module
from drafthead.train.distillation import server_pool
from drafthead.train.distillation.answer_source import DecoderSource
from drafthead.train.distillation.answers import DistillReport, distill
from drafthead.train.distillation.distilled_file import DistilledFile
from drafthead.train.distillation.server import ServerSource
from drafthead.train.distillation.server_pool import FIRST, Pace, PooledServer
from drafthead.train.settings import DistillSettings

SETTINGS = DistillSettings(
    "served", "prompts.jsonl", max_new_tokens=20, batch_size=1, temperature=1.0, seed=4
)


@dataclass
class Quick(Completions):
    """Answers without a model; log-probabilities are those of one."""

    decoder: FakeDecoder = field(default_factory=FakeDecoder)

    def complete(self, body: dict) -> dict:
        if body.get("echo"):
            return super().complete(body)
        time.sleep(self.seconds)
        asked = ServeRequest(body["prompt"], seed=body["seed"])
        ids = self.decoder.answer(asked, [asked], body["max_tokens"]).tokens
        ended = ids[-1] in body["stop_token_ids"]
        text = self.decoder.tokenizer.decode(ids[:-1] if ended else ids)
        return {"choices": [{"text": text, "token_ids": ids, "prompt_token_ids": body["prompt"],
                             "finish_reason": "stop" if ended else "length"}]}  # fmt: skip


@pytest.fixture
def two() -> Iterator[list[Quick]]:
    """Two servers of one model."""
    servers = [Quick(), Quick()]
    with ExitStack() as stack:
        for server in servers:
            server.url = stack.enter_context(serving(server))
        yield servers


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(connection_module, "BACKOFF", 0.002)


@pytest.fixture
def near(output: Path) -> bytes:
    """What one process writes, but for the weights that a server does not show."""
    path = output.with_name("near.jsonl")
    with DistilledFile(path, SETTINGS) as file:
        distill(DecoderSource(FakeDecoder()), asked(40, turns=2), file)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        del row["target_weights"]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def from_servers(servers: list[Quick], output: Path) -> DistillReport:
    decoder = servers[0].decoder
    source = ServerSource(
        [PooledServer(each.url, None, "served") for each in servers],
        decoder.tokenizer,
        frozenset(decoder.end_ids),
    )
    with DistilledFile(output, SETTINGS) as file:
        return distill(source, asked(40, turns=2), file)


def after(server: Quick, requests: int, do: Callable[[], None]) -> None:
    """Do something once a server has been asked so often."""
    complete, seen = server.complete, []

    def counted(body: dict) -> dict:
        seen.append(body)
        if len(seen) == requests:
            do()
        return complete(body)

    server.complete = counted


def test_rows_and_their_order_are_those_of_one_process(
    two: list[Quick], output: Path, near: bytes
) -> None:
    report = from_servers(two, output)
    assert output.read_bytes() == near and report.written == 40
    assert all(len(server.bodies) > 10 for server in two), "both have answered"


def test_rows_of_a_server_that_goes_are_answered_by_others_until_it_is_back(
    two: list[Quick], output: Path, near: bytes, caplog
) -> None:
    first, second = two

    def come_back() -> None:
        first.is_gone = False

    after(first, 10, lambda: setattr(first, "is_gone", True))
    after(second, 25, come_back)
    with caplog.at_level("INFO"):
        from_servers(two, output)
    assert output.read_bytes() == near
    logged = [text for text in caplog.messages if first.url in text]
    assert "is busy or away" in logged[0] and logged[-1].endswith("is asked again")


def test_a_server_that_comes_later_helps(two: list[Quick], output: Path, near: bytes) -> None:
    two[0].is_gone = True
    after(two[1], 10, lambda: setattr(two[0], "is_gone", False))
    from_servers(two, output)
    assert output.read_bytes() == near and two[0].bodies


def test_when_all_servers_are_gone_their_rows_stay(
    two: list[Quick], output: Path, near: bytes
) -> None:
    def go() -> None:
        for server in two:
            server.is_gone = True

    after(two[0], 30, go)
    with pytest.raises(
        UserError, match=rf"no server answers any more: {two[0].url}/v1 \(.*, .*start"
    ):
        from_servers(two, output)
    written = output.read_bytes()
    assert written and near.startswith(written)
    for server in two:
        server.is_gone = False
    from_servers(two, output)
    assert output.read_bytes() == near


def test_a_question_that_no_server_survives_ends_the_run(two: list[Quick], output: Path) -> None:
    prompt = two[0].decoder.tokenizer.encode("<|user|>0xxx<|end|><|assistant|>")
    for server in two:
        complete = server.complete

        def broken(body: dict, complete: Callable = complete) -> dict:
            return {}["crash"] if body["prompt"] == prompt else complete(body)

        server.complete = broken
    with pytest.raises(UserError, match="no answer from .*completions .remote end closed"):
        from_servers(two, output)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"models": ("other",)}, "serves the model served, .* other: start all servers alike"),
        ({"max_model_len": 32}, "serves max_model_len None, .* 32: start all servers alike"),
        ({"seed": 1}, "both serve served, but other weights"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_a_server_of_another_model_is_refused_by_name(
    two: list[Quick], output: Path, change: dict, sentence: str, later: bool
) -> None:
    """Also one that comes back with it."""
    other, found = two[1], Event()

    def exchange() -> None:
        other.models = change.get("models", other.models)
        if "max_model_len" in change:
            listed = other.listed()
            listed["data"][0] |= change
            other.listed = lambda: listed
        if "seed" in change:
            other.decoder.target = Target(tiny_llama(vocab_size=300, seed=1))
        other.is_gone = False
        if later:  # the first answers nothing more, or all is answered before the other is asked
            complete = two[0].complete
            two[0].complete = lambda body: (found.wait(30), complete(body))[1]

    if later:
        other.is_gone = True
        after(two[0], 5, exchange)
    else:
        exchange()
    with pytest.raises(UserError, match=f"{two[0].url} .*{other.url}|{sentence}"):
        from_servers(two, output)
    found.set()


def test_requests_at_a_time_double_while_tokens_a_second_grow(monkeypatch) -> None:
    """A server that answers up to 24 at a time as fast as one."""
    now = [0.0]
    monkeypatch.setattr(server_pool.time, "monotonic", lambda: now[0])
    pace, seen = Pace(), []
    while not pace.is_found:
        seen.append(pace.at_once)
        now[0] += 1 / min(pace.at_once, 24)
        pace.count(tokens=10, is_full=True)
    assert list(dict.fromkeys(seen)) == [FIRST, 8, 16, 32, 64]
    assert pace.at_once == 32


def test_only_a_server_that_has_enough_to_do_is_measured() -> None:
    pace = Pace()
    for _ in range(100):
        pace.count(tokens=10, is_full=False)
    assert pace.at_once == FIRST and not pace.is_found


def test_a_server_that_is_fast_beside_others_gets_more_requests(
    two: list[Quick], output: Path
) -> None:
    for server in two:
        server.seconds = 0.05
    from_servers(two, output)
    assert all(server.most > FIRST for server in two)


def test_a_busy_server_gets_fewer(two: list[Quick]) -> None:
    server = PooledServer(two[0].url, None, "served")
    server.rest(connection_module.AwayError("", "status 429", 30.0), time.monotonic())
    assert server.pace.at_once == FIRST // 2 and server.back_at > time.monotonic() + 25
