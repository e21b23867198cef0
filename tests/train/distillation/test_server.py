"""Answers of a server: the rows of a target in this process, and sentences for what goes wrong."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue

import pytest
from completion_server import Completions, serving
from distilled import asked, rows_by_id
from tiny import byte_tokenizer, target_folder
from transformers import GenerationConfig

from drafthead.core.errors import UserError
from drafthead.infer import Decoder
from drafthead.infer.serving import ServeRequest
from drafthead.train.distillation import connection as connection_module
from drafthead.train.distillation.answer_source import DecoderSource, without_repetition
from drafthead.train.distillation.answers import DistillReport, distill
from drafthead.train.distillation.connection import (
    ServerConnection,
    find_model,
    stored_end_ids,
    stored_penalty,
)
from drafthead.train.distillation.distilled_file import DistilledFile
from drafthead.train.distillation.server import ServerSource
from drafthead.train.distillation.server_pool import PooledServer
from drafthead.train.settings import DistillSettings

SETTINGS = DistillSettings("served", "prompts.jsonl", max_new_tokens=24, batch_size=3)


folder = target_folder(max_position_embeddings=64, initializer_range=0.5)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return Decoder.from_pretrained(folder, dtype="float32", device="cpu")


@pytest.fixture
def completions(decoder: Decoder) -> Iterator[Completions]:
    completions = Completions(decoder)
    with serving(completions) as completions.url:
        yield completions


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    """Requests are sent again at once."""
    monkeypatch.setattr(connection_module, "BACKOFF", 0)


def from_server(
    completions: Completions, output: Path, settings: DistillSettings = SETTINGS, **options: int
) -> DistillReport:
    """Distil through HTTP."""
    source = source_of(completions.decoder, completions.url)
    with DistilledFile(output, settings) as file:
        return distill(source, asked(**{"count": 7, **options}), file)


def source_of(decoder: Decoder, *urls: str) -> ServerSource:
    """The servers of a decoder."""
    servers = [PooledServer(url, None, SETTINGS.target) for url in urls]
    return ServerSource(servers, decoder.tokenizer, frozenset(decoder.end_ids))


def here(decoder: Decoder, output: Path, settings: DistillSettings, **options: int) -> None:
    """Distil in this process."""
    with DistilledFile(output, settings) as file:
        distill(DecoderSource(decoder), asked(**{"count": 7, **options}), file)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.7, "top_p": 0.8},
        {"end_repetition": False},
        {"batch_size": 1},
        {"max_new_tokens": 3},
        {"max_new_tokens": 300},  # the context ends first
    ],
)
def test_rows_are_those_of_the_same_target_in_this_process(
    completions: Completions, tmp_path: Path, change: dict[str, float]
) -> None:
    settings = replace(SETTINGS, **change)
    from_server(completions, tmp_path / "far.jsonl", settings, turns=2)
    here(completions.decoder, tmp_path / "near.jsonl", settings, turns=2)
    far, near = (tmp_path / name for name in ("far.jsonl", "near.jsonl"))
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in (far, near)]
    for row in rows[1]:
        del row["target_weights"]  # which a server does not show
    assert rows[0] == rows[1]


@pytest.mark.parametrize("shows_ends", [True, False])
def test_an_end_that_the_server_does_not_show_is_added(
    completions: Completions, tmp_path: Path, shows_ends: bool
) -> None:
    completions.shows_ends = shows_ends
    settings = replace(SETTINGS, temperature=1.0, max_new_tokens=60)
    report = from_server(completions, tmp_path / "far.jsonl", settings)
    here(completions.decoder, tmp_path / "near.jsonl", settings)
    assert report.statistics.ended["end_token"]
    far, near = (rows_by_id(tmp_path / name) for name in ("far.jsonl", "near.jsonl"))
    assert all(far[name]["token_ids"] == near[name]["token_ids"] for name in near)


def test_without_ids_the_text_is_encoded_and_the_rows_say_so(
    completions: Completions, tmp_path: Path
) -> None:
    completions.shows_ids = False
    report = from_server(completions, tmp_path / "a.jsonl")
    rows = rows_by_id(tmp_path / "a.jsonl").values()
    assert report.statistics.from_text == 7
    assert all(row["ids_from_text"] for row in rows)
    for row in rows:
        text = row["messages"][-1]["content"]
        ids = row["token_ids"][0]["answer"]
        assert byte_tokenizer().decode(ids, skip_special_tokens=False).startswith(text)


def test_requests_hold_ids_and_switch_the_filters_of_the_server_off(
    completions: Completions, tmp_path: Path
) -> None:
    from_server(completions, tmp_path / "a.jsonl", count=1)
    [body] = completions.bodies
    assert byte_tokenizer().decode(body["prompt"]) == "<|user|>0<|end|><|assistant|>"
    assert body["return_token_ids"] is True
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)


def test_a_busy_or_absent_server_is_asked_again(completions: Completions, tmp_path: Path) -> None:
    completions.failures = [429, 503, 0, 500, 0]
    report = from_server(completions, tmp_path / "a.jsonl")
    assert report.written == 7
    assert len(completions.bodies) == 7 + 5


@pytest.mark.parametrize(
    ("asked", "waits"),
    [
        ("1", True),
        ("Thu, 31 Dec 2099 23:59:59 GMT", True),  # cut to MOST
        ("Thu, 31 Dec 1998 23:59:59 GMT", False),
        ("soon", False),  # which is neither
    ],
)
def test_a_busy_server_says_when_it_wants_to_be_asked_again(
    completions: Completions, monkeypatch, tmp_path: Path, asked: str, waits: bool
) -> None:
    monkeypatch.setattr(connection_module, "MOST", 1)
    completions.failures, completions.retry_after = [503], asked
    began = time.monotonic()
    from_server(completions, tmp_path / "a.jsonl", replace(SETTINGS, max_new_tokens=1), count=1)
    assert (time.monotonic() - began > 0.9) == waits
    assert len(completions.bodies) == 2


def test_threads_end_when_nobody_reads_on(completions: Completions) -> None:
    completions.failures, completions.retry_after = [200] + [503] * 20, "60"
    before = set(threading.enumerate())
    source = source_of(completions.decoder, completions.url)
    questions: Queue[ServeRequest | None] = Queue()
    for name in "abc":
        questions.put(ServeRequest([1, 2], name, seed=0))
    answers = source.answers(questions, SETTINGS)
    next(answers)
    while len(completions.bodies) < 3:
        time.sleep(0.01)
    asking = [t for t in threading.enumerate() if t not in before and "(run)" in t.name]
    answers.close()
    for thread in asking:
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_a_server_that_stays_busy_ends_the_run_and_the_next_run_goes_on(
    completions: Completions, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("drafthead.train.distillation.answers.WINDOW", 1)
    # One request at a time, so the three that are answered are those of the first window.
    monkeypatch.setattr("drafthead.train.distillation.server_pool.FIRST", 1)
    monkeypatch.setattr("drafthead.train.distillation.server_pool.MOST_AT_ONCE", 1)
    output = tmp_path / "a.jsonl"
    completions.failures = [200] * 3 + [503] * 60
    with pytest.raises(UserError, match=r"busy \(503: planted 503\): run the same command"):
        from_server(completions, output)
    kept = len(rows_by_id(output))
    assert kept == 3
    completions.failures = []
    report = from_server(completions, output)
    assert (report.already_done, report.written) == (kept, 7 - kept)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (400, "row . of prompts.jsonl: .*/v1/completions refuses the request .400: planted 400"),
        (401, r"wants a key \(planted 401\): set OPENAI_API_KEY"),
        (404, r"completions was not found \(planted 404\): correct the address or --server-model"),
    ],
)
def test_a_request_that_cannot_be_answered_is_not_sent_again(
    completions: Completions, tmp_path: Path, status: int, sentence: str
) -> None:
    completions.failures = [status] * 3
    with pytest.raises(UserError, match=sentence):
        from_server(completions, tmp_path / "a.jsonl")
    assert len(completions.bodies) <= 7


def test_the_key_of_the_environment_is_sent(
    completions: Completions, tmp_path: Path, monkeypatch
) -> None:
    completions.key = "planted"
    monkeypatch.setenv("OPENAI_API_KEY", "planted")
    assert from_server(completions, tmp_path / "a.jsonl").written == 7
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UserError, match="set OPENAI_API_KEY"):
        from_server(completions, tmp_path / "b.jsonl")


def test_a_refused_connection_is_one_sentence() -> None:
    with pytest.raises(UserError, match="no answer from .*:9/v1/models .connection refused"):
        find_model(ServerConnection("http://127.0.0.1:9"), None, "served")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense", "ftp://x/", "http://"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="is not the address of a server"):
        find_model(ServerConnection(address), None, "served")


def test_a_server_of_another_kind_is_refused(completions: Completions) -> None:
    with pytest.raises(UserError, match="correct the address"):
        find_model(ServerConnection(f"{completions.url}/other"), None, "served")


def test_the_model_is_found_by_name(completions: Completions) -> None:
    connection = ServerConnection(completions.url + "/v1/")
    assert find_model(connection, None, "any").name == "served"
    completions.models = ("one", "two")
    assert find_model(connection, None, "two").name == "two"
    assert find_model(connection, "one", "two").name == "one"
    with pytest.raises(UserError, match="serves one, two: choose one with --server-model"):
        find_model(connection, None, "any")
    with pytest.raises(UserError, match="serves one, two, not three: correct --server-model"):
        find_model(connection, "three", "two")
    completions.models = ()
    with pytest.raises(UserError, match="serves no model"):
        find_model(connection, None, "any")


def test_a_server_with_other_tokens_is_refused(completions: Completions, tmp_path: Path) -> None:
    complete = completions.complete

    def shifted(body: dict) -> dict:
        answer = complete(body)
        answer["choices"][0]["token_ids"] = [100 for _ in answer["choices"][0]["token_ids"]]
        return answer

    completions.complete = shifted
    with pytest.raises(UserError, match="served on .* has other tokens than"):
        from_server(completions, tmp_path / "a.jsonl")


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"text": "a"}]}])
def test_an_answer_in_another_form_is_refused(
    completions: Completions, tmp_path: Path, answer: dict
) -> None:
    completions.complete = lambda body: answer
    with pytest.raises(UserError, match="does not answer as OpenAI's does"):
        from_server(completions, tmp_path / "a.jsonl")


def test_end_tokens_come_from_the_files_of_the_target(folder: Path, decoder: Decoder) -> None:
    assert stored_end_ids(str(folder), decoder.tokenizer) == decoder.end_ids


def test_a_penalty_of_the_targets_own_is_asked_of_the_server(tmp_path: Path, caplog) -> None:
    own = GenerationConfig(repetition_penalty=1.2, suppress_tokens=[5], top_k=3, do_sample=True)
    own.save_pretrained(tmp_path)
    assert stored_penalty(str(tmp_path)) == 1.2
    [message] = caplog.messages
    assert message.endswith("says so: suppress_tokens=[5]"), "sampling is as the settings say"
    assert stored_penalty(str(tmp_path / "nowhere")) == 1.0


@pytest.mark.parametrize("prompt_length", [1, 5, 40])
def test_a_whole_answer_is_cut_where_decoding_would_have_ended_it(prompt_length: int) -> None:
    prompt = list(range(100, 100 + prompt_length))
    answer = [*range(20), *([1, 2, 3] * 40)]
    kept = without_repetition(prompt, answer)
    assert 20 < len(kept) < len(answer)
    assert without_repetition(prompt, kept[:-1]) == kept[:-1]
    assert without_repetition(prompt, list(range(90))) == list(range(90))
