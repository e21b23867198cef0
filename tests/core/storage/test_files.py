"""Files that are written whole or not at all, by any number of writers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drafthead.core.storage.files import write_text


def test_writers_at_once_do_not_disturb_each_other(tmp_path) -> None:
    path = tmp_path / "file.json"
    texts = [letter * 5000 for letter in "abcd"]

    def write_often(text: str) -> None:
        for _ in range(200):
            write_text(path, text)
            assert path.read_text() in texts

    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(write_often, texts))
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.parametrize("error", [UnicodeEncodeError, OSError])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error) -> None:
    path = tmp_path / "file.json"
    write_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if error is OSError:
        monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(error):
        write_text(path, "new \ud800" if error is UnicodeEncodeError else "new")
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["file.json"]


def test_others_may_read_what_was_written(tmp_path) -> None:
    """As with any other new file."""
    write_text(tmp_path / "ours", "")
    (tmp_path / "usual").touch()
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode
