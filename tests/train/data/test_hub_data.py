"""Data sets of the hub: `datasets` reads them from files here, and the hub is a folder."""

import json
from pathlib import Path

import datasets
import pytest
from datasets import load_dataset_builder

from drafthead.core.errors import UserError
from drafthead.train.data import row_sources as module
from drafthead.train.data.conversations import read_conversations
from drafthead.train.data.row_sources import HubData, source_digest


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where data sets lie as NAME/CONFIG; `datasets` keeps what it downloads in `cache`."""

    def builder(name: str, config: str = "default") -> datasets.DatasetBuilder:
        files = {file.stem: str(file) for file in (tmp_path / name / config).glob("*.jsonl")}
        return load_dataset_builder("json", data_files=files, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(module, "load_dataset_builder", builder)
    return tmp_path


def publish(file: Path, number: int) -> None:
    """A split of so many questions."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"{file.stem} {i}", "answer": "b"} for i in range(number)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def texts(source: str, limit: int | None = None) -> list[str]:
    return [row.messages[0]["content"] for row in read_conversations(source, limit=limit)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", ["train 0", "train 1"]),
        ("org/name:test", ["test 0"]),
        ("org/name:main:train", ["train 0", "train 1", "train 2"]),
    ],
)
def test_names_carry_configuration_and_split(hub: Path, source: str, expected: list[str]) -> None:
    publish(hub / "org/name/default/train.jsonl", 2)
    publish(hub / "org/name/default/test.jsonl", 1)
    publish(hub / "org/name/main/train.jsonl", 3)
    assert texts(source) == expected


def test_the_first_rows_are_read_without_a_download_of_the_others(hub: Path) -> None:
    publish(hub / "org/name/default/train.jsonl", 5)
    assert texts("org/name", limit=2) == ["train 0", "train 1"]
    assert not list((hub / "cache").rglob("*.arrow"))


def test_what_was_downloaded_before_is_read_from_there(hub: Path) -> None:
    file = hub / "org/name/default/train.jsonl"
    publish(file, 2)
    HubData.named("org/name").builder.download_and_prepare()
    digest = source_digest("org/name")
    stored = HubData.named("org/name")
    file.unlink()
    assert [row["question"] for row in stored.rows()] == ["train 0", "train 1"]
    assert f"{stored.builder.cache_dir}:{stored.split}" == digest


def test_the_digest_changes_with_revision_and_split(hub: Path) -> None:
    publish(hub / "org/name/default/train.jsonl", 2)
    publish(hub / "org/name/default/test.jsonl", 2)
    first = source_digest("org/name")
    assert source_digest("org/name") == first != source_digest("org/name:test")
    publish(hub / "org/name/default/train.jsonl", 3)
    assert source_digest("org/name") != first


def test_a_split_that_is_not_there_is_named(hub: Path) -> None:
    publish(hub / "org/name/default/train.jsonl", 2)
    with pytest.raises(UserError, match=r"org/name:dev is neither .*dev.*NAME:CONFIG:SPLIT"):
        texts("org/name:dev")


def test_a_name_that_cannot_be_loaded_says_how_to_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*names: str) -> None:
        raise ConnectionError("offline\nsecond line")

    monkeypatch.setattr(module, "load_dataset_builder", load)
    with pytest.raises(UserError, match=r"org/name is neither a file .*\(offline\).*NAME:SPLIT"):
        read_conversations("org/name")
