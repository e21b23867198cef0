"""What a head is measured on: other data, or a share of its own that it does not learn from."""

import json
from pathlib import Path

import pytest
from tiny import byte_tokenizer

from drafthead.core.errors import UserError
from drafthead.train.data.training_rows import training_data
from drafthead.train.settings import DataConfig


def write(path: Path, questions: range) -> str:
    """A file with an answer to each question."""
    with path.open("w") as file:
        for number in questions:
            row = {"prompt": f"count {number}", "answer": f"{number} and so on"}
            file.write(json.dumps(row) + "\n")
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write(tmp_path / "data.jsonl", range(60))


def conversations(source: str, **settings: object) -> tuple[int, int | None]:
    """How many are trained on, and how many are measured on."""
    rows, held_out = training_data(DataConfig(source, **settings), byte_tokenizer(), seed=0)
    return len(rows.sequences), None if held_out is None else len(held_out.sequences)


def test_without_a_setting_everything_is_trained_on(source: str) -> None:
    assert conversations(source) == (60, None)


def test_a_share_is_measured_on_and_not_trained_on(source: str) -> None:
    rows, held_out = training_data(
        DataConfig(source, validation_share=0.2), byte_tokenizer(), seed=0
    )
    assert held_out is not None and 5 <= len(held_out.sequences) <= 20
    assert len(rows.sequences) + len(held_out.sequences) == 60
    assert not set(rows.sequences.digests) & set(held_out.sequences.digests)
    assert conversations(source, validation_share=0.2, max_validation=3)[1] == 3


def test_a_file_goes_before_the_share(source: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", range(100, 107))
    assert conversations(source, validation=other, validation_share=0.2) == (60, 7)


@pytest.mark.parametrize("share", [1e-6, 1 - 1e-6])
def test_a_share_that_leaves_nothing_is_an_error(source: str, share: float) -> None:
    with pytest.raises(UserError, match=f"validation_share={share} leaves .*another share"):
        training_data(DataConfig(source, validation_share=share), byte_tokenizer(), seed=0)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_share_is_between_0_and_1(share: float) -> None:
    with pytest.raises(UserError, match="validation_share must be (above 0|below 1)"):
        DataConfig("a.jsonl", validation_share=share)
