"""Answers are recorded as training reads them, and other drafts are loaded while clients ask."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from drafters import make_head
from fastapi.testclient import TestClient
from serve_stream import events
from tiny import byte_target

from drafthead.core.errors import UserError
from drafthead.heads.formats.drafthead import save_head
from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.serve.app import make_app
from drafthead.serve.protocol import Reader
from drafthead.serve.recording import Recorder
from drafthead.serve.server_options import ServerOptions
from drafthead.train.data.conversations import read_conversations
from drafthead.train.data.supervision import check_vocabulary, join_turns

CHAT, COMPLETIONS, DRAFTS = "/v1/chat/completions", "/v1/completions", "/v1/drafts"
KEY = {"Authorization": "Bearer secret"}
MESSAGES = [{"role": "user", "content": "hello"}]


def make_decoder(seed: int = 0) -> Decoder:
    return Decoder(byte_target(seed=seed), PromptLookup(3))


# ---- other drafts --------------------------------------------------------------------------------


def test_drafts_change_under_load_and_no_answer_is_lost(tmp_path: Path) -> None:
    """All answers, whole and streamed, begun before, between and after, are plain decoding's."""
    decoder = make_decoder()
    for number, family in enumerate(("eagle3", "medusa")):
        head = make_head(family, decoder.target, number)
        save_head(head, tmp_path / family, decoder.target, None, {})
    texts = [f"text {number} " * (1 + number % 5) for number in range(24)]
    plain = Decoder(decoder.target)
    prompts = [decoder.tokenizer(text)["input_ids"] for text in texts]
    expected = [plain.generate(ids, max_new_tokens=40).texts[0] for ids in prompts]
    options = ServerOptions("tiny", max_batch=4, api_keys=("secret",), drafts_from=(tmp_path,))
    with TestClient(make_app(decoder, options), headers=KEY) as client:

        def ask(number: int) -> str:
            body = {"prompt": texts[number], "temperature": 0, "max_tokens": 40}
            if number % 2:
                return client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
            chunks = events(client.post(COMPLETIONS, json={**body, "stream": True}).text)
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        with ThreadPoolExecutor(6) as pool:
            found = [pool.submit(ask, number) for number in range(len(texts))]
            names = []
            for drafts in (
                [str(tmp_path / "eagle3"), "lookup"], [], [str(tmp_path / "medusa")], "lookup",
                [str(tmp_path / "eagle3"), "answers"],
            ):  # fmt: skip
                loaded = client.post(DRAFTS, json={"draft": drafts})
                assert loaded.status_code == 200, loaded.text
                names.append(loaded.json()["drafters"])
                listed = [drafts] if isinstance(drafts, str) else drafts
                assert client.get(DRAFTS).json() == {"draft": listed, "drafters": names[-1]}
            assert [each.result() for each in found] == expected
        assert names == [["head", "lookup"], [], ["head"], ["lookup"], ["head", "answers"]]
        assert [ask(number) for number in range(4)] == expected[:4]
        body = {"prompt": texts[0], "temperature": 0, "max_tokens": 40, "draft": ["head"]}
        answers = [client.post(COMPLETIONS, json=body).json() for _ in range(4)]
        assert {answer["choices"][0]["text"] for answer in answers} == {expected[0]}
        # A draft that loses time is left out, though not of all answers.
        assert any("metrics" in answer for answer in answers)
        before = client.get(DRAFTS).json()
        refused = client.post(DRAFTS, json={"draft": [str(tmp_path / "nothing")]})
        assert refused.status_code == 400 and client.get(DRAFTS).json() == before
        assert client.post(DRAFTS, json={"draft": "lookup"}, headers=dict(KEY)).status_code == 200
        assert not client.app.state.server.loop.running


def test_only_who_has_a_key_changes_drafts() -> None:
    body = {"draft": ["lookup"]}
    with TestClient(make_app(make_decoder(), ServerOptions("tiny"))) as client:
        refused = client.post(DRAFTS, json=body)
        assert refused.status_code == 403 and "--api-key" in refused.json()["error"]["message"]
    with TestClient(make_app(make_decoder(), ServerOptions("t", api_keys=("secret",)))) as client:
        assert client.post(DRAFTS, json=body).status_code == 401
        assert client.post(DRAFTS, json=body, headers=KEY).json()["drafters"] == ["lookup"]


# ---- records -------------------------------------------------------------------------------------


def serve_and_record(path: Path, bodies: list[tuple[str, dict]], **options: object) -> list[dict]:
    decoder = make_decoder()
    asked = ServerOptions("tiny", record=path, target="tiny", **options)
    with TestClient(make_app(decoder, asked)) as client:
        return [client.post(url, json=body).json() for url, body in bodies]


def test_answers_are_recorded_as_rows_that_training_reads(tmp_path: Path, caplog) -> None:
    """The token ids that were read and written, and nothing that is not the target's own text."""
    path, decoder = tmp_path / "answers.jsonl", make_decoder()
    body = {"messages": MESSAGES, "max_tokens": 12, "return_token_ids": True}
    drawn = {**body, "temperature": 0.9, "seed": 4}
    completion = {"prompt": "abc", "temperature": 0, "max_tokens": 5, "return_token_ids": True}
    left_out = [
        {**body, "repetition_penalty": 1.2}, {**body, "store": False},
        {**body, "guided_regex": "a"}, {**body, "logit_bias": {"9": 3}},
        {**drawn, "verifier": "typical"},
    ]  # fmt: skip
    bodies = [(CHAT, {**body, "temperature": 0}), (CHAT, drawn), (COMPLETIONS, completion)]
    found = serve_and_record(path, [*bodies, *((CHAT, each) for each in left_out)])
    assert any("tell your users" in message for message in caplog.messages)
    assert path.stat().st_mode & 0o077 == 0
    rows = read_conversations(path)
    assert len(rows) == 3
    for row, answer in zip(rows, found, strict=False):
        [choice], [turn] = answer["choices"], row.tokens.answers
        assert turn.prompt == {**answer, **choice}["prompt_token_ids"]
        assert turn.answer == choice["token_ids"]
        check_vocabulary(row.tokens, decoder.tokenizer, row.where)
        assert sum(join_turns(row.tokens.answers)[0].mask) == len(turn.answer)
        assert row.writer.name == "tiny"
    assert rows[0].messages[0]["content"] == "hello"
    assert rows[0].messages[1]["content"] == found[0]["choices"][0]["message"]["content"]


def test_the_source_of_answers_is_made_once_where_they_are_recorded(tmp_path, monkeypatch) -> None:
    made, source = list[Any](), Reader.source
    monkeypatch.setattr(Reader, "source", lambda *given: (made.append(given), source(*given))[1])
    body = {"prompt": ["abc", "de"], "n": 3, "temperature": 0.9, "max_tokens": 4}
    with TestClient(make_app(make_decoder(), ServerOptions("tiny"))) as client:
        assert len(client.post(COMPLETIONS, json=body).json()["choices"]) == 6
    assert not made
    path = tmp_path / "answers.jsonl"
    serve_and_record(path, [(COMPLETIONS, body)])
    texts = [row.messages[0]["content"] for row in read_conversations(path)]
    assert len(made) == 2 and sorted(texts) == 3 * ["abc"] + 3 * ["de"]


def test_an_answer_that_went_on_after_its_end_is_recorded_up_to_it(tmp_path: Path) -> None:
    path, decoder = tmp_path / "answers.jsonl", make_decoder()
    decoder.end_ids = frozenset({70})
    asked = ServerOptions("tiny", record=path, target="tiny")
    body = {"messages": MESSAGES, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    with TestClient(make_app(decoder, asked)) as client:
        replies = [
            client.post(CHAT, json={**body, "temperature": 1.5, "seed": n}).json() for n in range(9)
        ]
    answers = [reply["choices"][0]["token_ids"] for reply in replies]
    cut = [each[: each.index(70) + 1] if 70 in each else each for each in answers]
    assert {len(each) for each in answers} == {60} and min(map(len, cut)) < 60
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["token_ids"][0]["answer"] for row in rows] == cut
    assert [row["finished"] for row in rows] == [70 in each for each in answers]


def test_a_record_goes_on_after_a_kill_up_to_its_bytes(tmp_path: Path, caplog) -> None:
    path = tmp_path / "answers.jsonl"
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 4}
    serve_and_record(path, [(CHAT, body)])
    size = path.stat().st_size
    with path.open("a") as file:
        file.write('{"id": "half')
    serve_and_record(path, [(CHAT, body)])
    assert len(read_conversations(path)) == 2 and abs(path.stat().st_size - 2 * size) < 8
    caplog.set_level(logging.WARNING)
    recorder = Recorder(path, path.stat().st_size + 1, make_decoder(), "tiny")
    decoder = make_decoder()
    app = make_app(decoder, ServerOptions("tiny"))
    with TestClient(app) as client:
        client.app.state.server.loop.recorder = recorder
        for _ in range(2):
            assert client.post(CHAT, json=body).status_code == 200
    assert len(read_conversations(path)) == 2
    assert sum("no more answers are recorded" in each for each in caplog.messages) == 1
    for other in (make_decoder(seed=1), decoder):
        place = path if other is not decoder else tmp_path / "missing" / "file"
        with pytest.raises(UserError, match="has no answers of this model|No such file"):
            Recorder(place, 1 << 20, other, "tiny")


def test_a_row_that_cannot_be_written_ends_the_record_and_no_answer(tmp_path, caplog) -> None:
    caplog.set_level(logging.WARNING)
    decoder = make_decoder()
    recorder = Recorder(tmp_path / "answers.jsonl", 1 << 20, decoder, "tiny")
    recorder.file.close()
    with TestClient(make_app(decoder, ServerOptions("tiny"))) as client:
        client.app.state.server.loop.recorder = recorder
        body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 4}
        assert [client.post(CHAT, json=body).status_code for _ in range(2)] == [200, 200]
    assert (
        sum("no more answers are recorded: " in m and "closed file" in m for m in caplog.messages)
        == 1
    )
