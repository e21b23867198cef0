"""Conversations as tokens in an Arrow file that later runs map."""

import json
from datetime import date, timedelta
from pathlib import Path

import pytest
import torch
from runs import in_memory
from tiny import byte_tokenizer, write_conversations

from drafthead.core.errors import UserError
from drafthead.core.storage import disk_cache
from drafthead.train.data import token_table as module
from drafthead.train.data.conversations import Writer, read_conversations
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.packing import PackedData
from drafthead.train.data.sequences import TokenSequence, TokenTable, mixed
from drafthead.train.data.supervision import supervised_sequences
from drafthead.train.data.token_table import token_table
from drafthead.train.data.training_rows import load_packed
from drafthead.train.learning.evaluation import by_category
from drafthead.train.learning.ranks import RankedAnchors
from drafthead.train.settings import DataConfig


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(module, "cache_or_scratch", lambda _: folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of conversations."""
    write_conversations(tmp_path / "data.jsonl", 30, seed=0)
    return tmp_path / "data.jsonl"


def reading(source: Path, max_length: int = 64, limit: int | None = None) -> Reading:
    return Reading(str(source), None, max_length, limit)


@pytest.fixture
def readings(monkeypatch) -> list[str]:
    """The sources that were really read."""
    found: list[str] = []
    real = module.iter_conversations

    def noted(source: str, *others):
        found.append(source)
        return real(source, *others)

    monkeypatch.setattr(module, "iter_conversations", noted)
    return found


def test_a_table_holds_what_the_conversations_teach(cache, source, monkeypatch) -> None:
    monkeypatch.setattr(module, "BATCH", 7)
    tokenizer = byte_tokenizer()
    table = token_table(reading(source, max_length=1000), tokenizer)
    expected = [
        marked
        for conversation in read_conversations(source)
        for marked in supervised_sequences(tokenizer, conversation)
    ]
    assert len(table) == len(expected) == 30
    for found, wanted in zip(table, expected, strict=True):
        assert found.input_ids.tolist() == wanted.input_ids
        assert found.supervised.tolist() == wanted.mask
    assert table.lengths.tolist() == [len(one.input_ids) for one in expected]
    assert table.num_supervised.tolist() == [sum(one.mask) for one in expected]
    learnt = [i for one in expected for i, m in zip(one.input_ids, one.mask, strict=True) if m]
    assert (
        table.token_counts(300).tolist()
        == torch.bincount(torch.tensor(learnt), minlength=300).tolist()
    )


def test_a_source_is_read_once(cache, source, readings) -> None:
    tables = [token_table(reading(source), byte_tokenizer()) for _ in range(2)]
    assert len(readings) == 1
    assert tables[0].digest == tables[1].digest
    assert [one.input_ids.tolist() for one in tables[0]] == [
        one.input_ids.tolist() for one in tables[1]
    ]


def test_another_place_of_the_same_content_is_not_read_again(cache, source, readings) -> None:
    token_table(reading(source), byte_tokenizer())
    token_table(reading(source.rename(source.with_name("other.jsonl"))), byte_tokenizer())
    assert len(readings) == 1


class Tomorrow(date):
    """The day after, for templates that write it."""

    @classmethod
    def today(cls) -> date:
        return date.today() + timedelta(days=1)


CHANGES = ["content", "length", "limit", "template", "vocabulary", "special token", "version",
           "date"]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_tokens_depend_on_is_read_anew(
    cache, source, readings, monkeypatch, change: str
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += "{% if strftime_now is defined %}{% endif %}"
    token_table(reading(source), tokenizer)
    if change == "content":
        source.write_text(source.read_text().replace("count", "c"))
    elif change == "template":
        tokenizer.chat_template += " "
    elif change == "vocabulary":
        template = tokenizer.chat_template
        tokenizer = byte_tokenizer(("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"))
        tokenizer.chat_template = template
    elif change == "special token":  # `eos_token`, say, is what many templates end answers with
        tokenizer.eos_token = "<|user|>"
    elif change == "version":
        monkeypatch.setattr(module, "version", lambda package: f"later than this {package}")
    elif change == "date":
        monkeypatch.setattr(module, "date", Tomorrow)
    settings = {"length": {"max_length": 63}, "limit": {"limit": 7}}.get(change, {})
    table = token_table(reading(source, **settings), tokenizer)
    assert len(readings) == 2
    assert len(table) == (7 if change == "limit" else 30)


def test_the_date_does_not_matter_where_no_template_writes_it(
    cache, source, readings, monkeypatch
) -> None:
    token_table(reading(source), byte_tokenizer())
    monkeypatch.setattr(module, "date", Tomorrow)
    token_table(reading(source), byte_tokenizer())
    assert len(readings) == 1


def test_who_answered_is_kept(cache, tmp_path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"messages": messages, "finished": True, "target": "mine", "target_weights": "w"},
        {"messages": messages},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for _ in range(2):
        table = token_table(reading(tmp_path / "a.jsonl"), byte_tokenizer())
        assert table.writers == {Writer("mine", "w"), None}


def test_tau_by_category_is_that_of_the_categorys_answers(cache, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "BATCH", 2)
    kinds = [
        {"category": "code"},
        {"category": "chat", "language": "Thai"},
        {},
        {"category": "code"},
    ]
    rows = [{"prompt": f"{n}?", "answer": "an answer"} | kind for n, kind in enumerate(kinds)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = token_table(reading(tmp_path / "data.jsonl"), byte_tokenizer())
    assert table.categories == ["code", "chat, Thai", None, "code"]
    data = PackedData(table, ((0, 1), (2, 3)))
    keys = [(row, segment) for row in (0, 1) for segment in (1, 2) for _ in range(3)]
    right = [0, 0, 0, 9, 9, 9, 9, 9, 9, 0, 0, 0]  # first guesses: all for code, none for others
    ranked = RankedAnchors(torch.tensor(right)[:, None], keys, 4 * [3, 4, 5])
    found = by_category(ranked, {(): 12, (0,): 6}, data)
    assert found == {"chat, Thai": 1.0, "code": 2.0}


def test_a_source_that_breaks_off_leaves_nothing(cache, source, readings) -> None:
    whole = source.read_text()
    source.write_bytes(whole.encode() + b"\xff")
    with pytest.raises(UserError, match="is not UTF-8"):
        token_table(reading(source), byte_tokenizer())
    assert not [path for path in cache.rglob("*") if path.suffix in (".arrow", ".json")]
    source.write_text(whole)
    assert len(token_table(reading(source), byte_tokenizer())) == 30


def test_what_is_left_out_has_the_name_that_the_file_has_now(cache, tmp_path, caplog) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": messages}, {"messages": messages[:1]}]
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text("\n".join(map(json.dumps, rows)))
    token_table(reading(old), byte_tokenizer())
    caplog.clear()
    token_table(reading(old.rename(new)), byte_tokenizer())
    assert f"row 2 of {new}" in caplog.text and str(old) not in caplog.text


def test_without_a_cache_the_table_is_the_same(source, monkeypatch) -> None:
    monkeypatch.setattr(disk_cache, "usable_cache_folder", lambda _: None)
    table = token_table(reading(source), byte_tokenizer())
    assert len(table) == 30


def test_tables_in_memory_hold_sequences() -> None:
    sequences = [
        TokenSequence(torch.tensor(ids, dtype=torch.int32), torch.tensor(ids) > 5)
        for ids in ([5, 6, 7], [8])
    ]
    table = in_memory(sequences)
    assert [one.input_ids.tolist() for one in table[:2]] == [[5, 6, 7], [8]]
    assert table[-1].supervised.tolist() == [True]
    with pytest.raises(IndexError):
        table[2]


def table_of(*numbers: int) -> TokenTable:
    """Sequences of a one, which is not learnt, and one of the numbers."""
    learnt = torch.tensor([False, True])
    pairs = [torch.tensor([1, number], dtype=torch.int32) for number in numbers]
    return in_memory(TokenSequence(pair, learnt) for pair in pairs)


def two_answers_each(prompts: int) -> TokenTable:
    """Sequences of a prompt's token and its answer's, 500 or 501."""
    learnt = torch.tensor([False, True])
    pairs = [(prompt, 500 + answer) for answer in range(2) for prompt in range(prompts)]
    return in_memory(TokenSequence(torch.tensor(p, dtype=torch.int32), learnt) for p in pairs)


@pytest.mark.parametrize(("share", "most"), [(0.1, 1000), (0.5, 1000), (0.5, 21)])
def test_a_share_is_held_out_with_all_answers_to_its_prompts(share: float, most: int) -> None:
    table = two_answers_each(200)
    left, apart = table.parted(share, most)
    assert len(left) + len(apart) == 400 and len(apart) <= most
    assert len(apart) == pytest.approx(min(400 * share, most), rel=0.25)
    prompts = [{int(one.input_ids[0]) for one in part} for part in (left, apart)]
    assert not prompts[0] & prompts[1] and len(prompts[1]) == len(apart) / 2
    again = table.parted(share, most)
    assert (left.digest, apart.digest) == (again[0].digest, again[1].digest)
    assert len({table.digest, left.digest, apart.digest}) == 3


def test_what_is_held_out_is_measured_once_however_often_it_would_be_learnt() -> None:
    table = mixed([two_answers_each(200)], [2.0], seed=0)
    left, apart = table.parted(0.2, 1000)
    assert len(left) + 2 * len(apart) == 800
    assert len({tuple(one.input_ids.tolist()) for one in apart}) == len(apart)


def test_weights_say_how_often_a_source_is_read() -> None:
    table = mixed([table_of(5, 6), table_of(*range(10, 20)), table_of(7)], [2, 0.3, 1.0], seed=4)
    found = [int(one.input_ids[1]) for one in table]
    assert found[:4] == [5, 6, 5, 6] and found[-1] == 7
    assert len(found) == 8 and len(set(found[4:7])) == 3 and set(found[4:7]) <= set(range(10, 20))
    assert table.lengths.tolist() == [2] * 8 and table.num_supervised.tolist() == [1] * 8
    counts = table.token_counts(20)
    assert [counts[n] for n in (1, 5, 6, 7)] == [0, 2, 2, 1] and counts.sum() == 8


def test_a_seed_and_weights_make_one_mixture() -> None:
    tables = [table_of(*range(10, 20)), table_of(5)]

    def digest(weight: float, seed: int) -> str:
        return mixed(tables, [weight, 1.0], seed).digest

    assert digest(0.5, 1) == digest(0.5, 1)
    assert len({digest(0.5, 1), digest(0.5, 2), digest(0.6, 1)}) == 3


def test_a_run_reads_several_sources_by_their_weights(cache, source, tmp_path) -> None:
    write_conversations(tmp_path / "more.jsonl", 8, seed=1)
    sources = {str(source): 1.0, str(tmp_path / "more.jsonl"): 0.5}
    data = load_packed(sources, byte_tokenizer(), DataConfig(sources, max_length=64), seed=0)
    assert sorted(i for row in data.rows for i in row) == list(range(34))
    with pytest.raises(UserError, match="leave no conversation"):
        load_packed({str(source): 0.01}, byte_tokenizer(), DataConfig(sources), seed=0)


@pytest.mark.parametrize("weights", [{}, {"a.jsonl": 0}, {"a.jsonl": 1, "b.jsonl": -1}])
def test_weights_must_be_positive(weights) -> None:
    with pytest.raises(ValueError, match="weights above 0"):
        DataConfig(weights)
