"""What is logged about training data: rows left out, answers of another model, held-out copies."""

import json
from pathlib import Path

import pytest
import torch
from runs import in_memory
from tiny import byte_tokenizer

from drafthead.core.errors import UserError
from drafthead.train.data.conversations import Writer
from drafthead.train.data.packing import PackedData
from drafthead.train.data.sequences import TokenSequence
from drafthead.train.data.training_rows import (
    DataConfig,
    check_held_out,
    check_writers,
    load_packed,
)

CONFIG = DataConfig("", max_length=64)
QUESTION = {"role": "user", "content": "a"}
ANSWERED = {"messages": [QUESTION, {"role": "assistant", "content": "b"}]}


def write(folder: Path, *rows: dict[str, object]) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_without_an_answer_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unanswered, alone = {"messages": [QUESTION]}, {"messages": [ANSWERED["messages"][1]]}
    source = write(tmp_path, ANSWERED, unanswered, ANSWERED, alone)
    assert len(load_packed({source: 1.0}, byte_tokenizer(), CONFIG, seed=0).sequences) == 2
    sentence = "2 of 4 rows are left out; the first: 0 supervised tokens in row 2 of"
    assert sentence in caplog.text
    caplog.clear()
    load_packed({source: 1.0}, byte_tokenizer(), CONFIG, seed=0)
    assert sentence in caplog.text, "it is logged again when the tokens come out of the cache"


def test_data_without_any_answer_are_an_error(tmp_path: Path) -> None:
    source = write(tmp_path, {"messages": [QUESTION]}, {"prompt": "c"})
    with pytest.raises(UserError, match="0 supervised tokens in row 1 of .*distill the prompts"):
        load_packed({source: 1.0}, byte_tokenizer(), CONFIG, seed=0)


def test_rows_name_the_model_that_answered(tmp_path: Path) -> None:
    known = {**ANSWERED, "target": "m", "finished": True, "target_weights": "w"}
    older = {**ANSWERED, "target": "m", "finished": True}
    foreign = {**ANSWERED, "target": "a label of another task"}
    source = write(tmp_path, known, older, foreign)
    writers = load_packed({source: 1.0}, byte_tokenizer(), CONFIG, seed=0).sequences.writers
    assert writers == {Writer("m", "w"), Writer("m", None), None}


@pytest.mark.parametrize(
    ("writer", "words"),
    [
        (Writer("elsewhere/mine", "w"), ""),  # a copy in another folder
        (Writer("./mine", None), ""),
        (Writer("mine", "x"), "holds answers of mine, and the head is for mine"),  # fine-tuned
        (Writer("other", None), "holds answers of other, and the head is for mine"),
        (None, "do not say which model answered"),
    ],
)
def test_answers_of_another_model_are_noticed(
    caplog: pytest.LogCaptureFixture, writer: Writer | None, words: str
) -> None:
    check_writers("data.jsonl", {writer}, "mine", "w")
    assert (words in caplog.text) if words else not caplog.text


def packed(*numbers: int) -> PackedData:
    learnt = torch.tensor([False, True])
    sequences = [TokenSequence(torch.tensor([1, n], dtype=torch.int32), learnt) for n in numbers]
    return PackedData(in_memory(sequences), tuple((i,) for i in range(len(numbers))))


def test_held_out_data_that_are_training_data_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    check_held_out(packed(1, 2), packed(3, 4), "val.jsonl")
    assert not caplog.text
    check_held_out(packed(1, 2), packed(2, 3, 4), "val.jsonl")
    assert "1 of 3 conversations in val.jsonl are training data" in caplog.text
    with pytest.raises(UserError, match=r"everything in val.jsonl is training data"):
        check_held_out(packed(1, 2, 3), packed(2, 1), "val.jsonl")
