"""What tests of distilled files share."""

from pathlib import Path

import pytest

from drafthead.train.distillation import answers


@pytest.fixture
def one_batch_in_a_window(monkeypatch) -> None:
    """Batches are answered one after the other, so that a test knows what is in each."""
    monkeypatch.setattr(answers, "WINDOW", 1)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The file to be written."""
    return tmp_path / "answers.jsonl"
