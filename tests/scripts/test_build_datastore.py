"""`drafthead build-datastore`."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import byte_tokenizer, write_conversations

from drafthead.heads.target.vocabulary import vocabulary_of
from drafthead.infer.drafters.datastore import Datastore
from drafthead.scripts import cli
from drafthead.scripts.build_datastore import HELD_OUT, answers
from drafthead.train.token_table import TokenSequence


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the verb on conversations; returns status, output and errors."""
    byte_tokenizer().save_pretrained(tmp_path / "target")

    def run(rows: int, output: Path) -> tuple[int, str, str]:
        write_conversations(tmp_path / "data.jsonl", rows, seed=0)
        words = ["--data", f"{tmp_path}/data.jsonl", "--tokenizer", f"{tmp_path}/target"]
        words += ["--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["drafthead", "build-datastore", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        shown = capsys.readouterr()
        return stop.value.code or 0, shown.out, shown.err

    return run


def test_answers_are_indexed_and_measured(run, tmp_path: Path) -> None:
    status, out, _ = run(3 * HELD_OUT, tmp_path / "store")
    assert status == 0
    assert f"{3 * HELD_OUT - 3} answers" in out and "on 3 answers that" in out
    store = Datastore.load(tmp_path / "store", vocabulary_of(byte_tokenizer()))
    assert store.record.reached[8][0] > 0.5, "the answers repeat a word"
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").open()]
    texts = [f"{row['messages'][1]['content'].strip()}" for row in rows]
    assert any(text.startswith("abcd abcd") for text in texts)
    past = byte_tokenizer().encode("abcd ab", add_special_tokens=False)
    _, following = next(store.continuations(past))
    assert byte_tokenizer().decode(following[:2]) == "cd"


def test_few_answers_are_indexed_without_a_measurement(run, tmp_path: Path) -> None:
    status, out, _ = run(HELD_OUT - 1, tmp_path / "store")
    assert status == 0 and "was not measured" in out
    assert Datastore.load(tmp_path / "store", vocabulary_of(byte_tokenizer())).record.reached == {}


def test_a_folder_with_something_in_it_is_left_alone(run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    status, _, err = run(3, tmp_path / "full")
    assert status == 2 and "is not empty: choose another folder" in err


def test_answers_are_the_supervised_runs() -> None:
    ids = torch.tensor([5, 6, 7, 8, 9], dtype=torch.int32)
    sequence = TokenSequence(ids, torch.tensor([False, True, True, False, True]))
    assert list(answers(sequence)) == [[6, 7], [9]]
