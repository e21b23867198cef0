"""Invented prompts: the same file whatever happens to a run, and what a target is asked."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from distilled import FakeSource
from tiny import byte_tokenizer, write_target

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.train.data.conversations import read_conversations
from drafthead.train.jobs.outputs import ResumableRows, manifest_path
from drafthead.train.prompts import invention
from drafthead.train.prompts.invention import InventReport, TooFewMessagesError, invent
from drafthead.train.prompts.message_source import InventedMessage, MessageSource
from drafthead.train.settings import InventSettings


def written(path: Path, number: int, source: FakeSource | None = None) -> bytes:
    invent(source or FakeSource(), path, number)
    return path.read_bytes()


@pytest.fixture
def whole(tmp_path) -> bytes:
    """What an uninterrupted run of 11 prompts writes."""
    return written(tmp_path / "whole.jsonl", 11)


def test_rows_are_prompts_of_distill(tmp_path, whole) -> None:
    rows = read_conversations(tmp_path / "whole.jsonl")
    assert len(rows) == 11
    assert rows[0].id == "invented-0-0"
    assert rows[0].messages == [{"role": "user", "content": "What is topic 0 about? größer"}]
    numbers = [int(row.id.rpartition("-")[2]) for row in rows]
    assert numbers == [0, 1, 2, 3, 5, 7, 8, 10, 11, 12, 15]


def test_a_system_message_is_part_of_the_rows(tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    written(path, 2, FakeSource(InventSettings("fake", system="Be brief", batch_size=4)))
    first, second = read_conversations(path)
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert second.messages[0]["content"] == "Be brief"


def kill_before_the_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = ResumableRows.save, iter(range(9))
    monkeypatch.setattr(
        ResumableRows, "save", lambda rows: save(rows) if next(calls) < 2 else 1 / 0
    )
    invent(FakeSource(), path, 11)


def kill_within_a_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        kill_before_the_record(path, monkeypatch)
    finally:
        path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("kill", [kill_before_the_record, kill_within_a_line])
def test_a_killed_run_continues_to_the_same_file(
    tmp_path, whole, kill: Callable, monkeypatch
) -> None:
    path = tmp_path / "prompts.jsonl"
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        kill(path, patch)
    source = FakeSource()
    assert written(path, 11, source) == whole
    assert 0 not in source.asked  # the first batch was kept


def test_a_file_can_grow_and_a_finished_one_asks_for_nothing(tmp_path, whole) -> None:
    path = tmp_path / "prompts.jsonl"
    for number in (3, 6):
        written(path, number)
    assert written(path, 11) == whole
    source = FakeSource()
    assert invent(source, path, 11) == InventReport(11, {}, 0, 0.0)
    assert not source.asked


def test_the_bar_counts_the_tokens_of_all_passes(tmp_path, capsys) -> None:
    tokens = invent(FakeSource(), tmp_path / "prompts.jsonl", 3).tokens
    assert f" {tokens:,} tokens, " in capsys.readouterr().err


def test_dropped_messages_are_counted_over_all_runs(tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    alone = invent(FakeSource(), tmp_path / "alone.jsonl", 11)
    invent(FakeSource(), path, 6)
    assert invent(FakeSource(), path, 11).dropped == alone.dropped
    assert alone.kept == 11 and alone.dropped == {
        "no end within the limit": 3,
        "same as another": 2,
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: manifest_path(path).unlink(), "cannot be continued"),
        (lambda path: manifest_path(path).write_text("{"), "cannot be continued"),
        (lambda path: path.write_bytes(b""), "has lost rows"),
    ],
)
def test_a_file_that_cannot_be_continued_is_left_alone(tmp_path, change, problem) -> None:
    path = tmp_path / "prompts.jsonl"
    written(path, 6)
    change(path)
    before = path.read_bytes()
    with pytest.raises(UserError, match=problem):
        invent(FakeSource(), path, 11)
    assert path.read_bytes() == before
    assert invent(FakeSource(), path, 6, overwrite=True).kept == 6


def test_a_run_killed_while_it_begins_can_be_repeated(tmp_path, whole, monkeypatch) -> None:
    path = tmp_path / "prompts.jsonl"
    for owner, name in ((ResumableRows, "save"), (invention, "AnswerBar")):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(owner, name, lambda *_: 1 / 0)
            invent(FakeSource(), path, 11)
    assert written(path, 11) == whole


def test_other_settings_are_refused(tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    written(path, 3)
    with pytest.raises(UserError, match="was started with seed 0, now 1"):
        invent(FakeSource(InventSettings("fake", seed=1, batch_size=4)), path, 3)


def test_a_target_that_brings_nothing_new_ends_the_run(tmp_path) -> None:
    source = FakeSource()
    source.message = lambda number: InventedMessage(number, "always the same words", 3, True, False)
    with pytest.raises(
        UserError, match=r"nothing new in 20 batches: 1 of 5 messages .*same as another"
    ):
        invent(source, tmp_path / "prompts.jsonl", 5)


def test_what_is_kept_stays_when_the_time_is_over(tmp_path, monkeypatch, whole) -> None:
    path, clock = tmp_path / "slow.jsonl", iter(range(1000, 2000, 7))
    monkeypatch.setattr(invention, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    # A pass at 1000 and 1007 s, the next ones at 1014 and 1021.
    with pytest.raises(TooFewMessagesError, match=r"too little in 20 seconds: 6 of 11 .* no end"):
        invent(FakeSource(), path, 11, seconds=20)
    assert len(path.read_bytes().splitlines()) == 6
    invent(FakeSource(), path, 11)
    assert path.read_bytes() == whole


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, initializer_range=0.05)
    return load_decoder_only(folder, "float32", "cpu")


def test_a_message_depends_on_its_number_alone(target) -> None:
    def messages(batch_size: int, batches: int) -> list[InventedMessage]:
        settings = InventSettings("tiny", batch_size=batch_size, max_new_tokens=30, seed=3)
        source = MessageSource(Decoder(target), settings)
        return [message for index in range(batches) for message in source.batch(index, [].append)]

    by_two = messages(2, 6)
    assert by_two == messages(12, 1)
    assert len({message.text for message in by_two}) == 12


def test_the_target_reads_the_template_up_to_the_users_turn(target, monkeypatch) -> None:
    """Its words and its end are drawn by the target alone, as `Decoder.generate` would."""
    source = MessageSource(Decoder(target), InventSettings("tiny", batch_size=1))
    tokenizer = byte_tokenizer()
    end, user = tokenizer.convert_tokens_to_ids(["<|end|>", "<|user|>"])
    assert source.turn.prefix == [user] and source.ends == {end}
    words = tokenizer("hi you")["input_ids"]
    assert source._message(0, [], [*words, end], True) == InventedMessage(
        0, "hi you", 7, True, False
    )
    inside = source._message(0, [], [*words, user, *words, end], True)
    assert inside.has_control_token and inside.tokens == 14


def test_a_base_model_continues_beginnings_or_is_refused(target, monkeypatch) -> None:
    base = byte_tokenizer()
    base.chat_template = None
    monkeypatch.setattr(target, "tokenizer", base)
    settings = InventSettings("tiny", batch_size=3, max_new_tokens=5)
    with pytest.raises(UserError, match="tiny has no chat template.*--beginnings"):
        MessageSource(Decoder(target), settings)
    texts = ["A long text about ships and the sea, all of it", "short"]
    source = MessageSource(Decoder(target), settings, texts)
    messages = source.batch(0, [].append)
    assert [message.text[:2] for message in messages] == ["A ", "sh", "A "]
    assert messages[0].text.startswith(texts[0][:16]) and messages[0].text != messages[2].text


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"batch_size": 0}])
def test_settings_without_sense_are_refused(wrong) -> None:
    with pytest.raises(UserError, match=next(iter(wrong)).split("_")[0]):
        InventSettings("tiny", **wrong)
