"""A cache that cannot be used costs time and one sentence, never an answer."""

import logging
from pathlib import Path
from typing import Any

import pytest

from drafthead.core.storage import disk_cache
from drafthead.core.storage.disk_cache import (
    cache_folder,
    read_cached,
    usable_cache_folder,
    write_cached,
)


@pytest.fixture(autouse=True)
def nothing_logged_yet() -> None:
    disk_cache.log_unusable.cache_clear()


def test_what_was_written_is_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "to be made"))
    path = cache_folder("kind") / "file"
    assert read_cached(path) is None
    write_cached(path, "text")
    assert read_cached(path) == "text"
    assert usable_cache_folder("kind") == path.parent
    assert [file.name for file in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("place", ["a file", "below a file", "read-only", "no home"])
def test_where_nothing_can_be_written_one_sentence_is_logged(
    place, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "regular").touch()
    below = {"a file": "regular", "below a file": "regular/folder"}.get(place, "folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / below))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    if place == "read-only":  # permissions do not stop an administrator
        monkeypatch.setattr(Path, "mkdir", refuse)
    if place == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert usable_cache_folder("kind") is None
            write_cached(cache_folder("kind") / "file", "text")
            assert read_cached(cache_folder("kind") / "file") is None
    [record] = caplog.records
    reason = "Read-only file system" if place == "read-only" else "Not a directory"
    assert f"{cache_folder('kind')} ({reason})" in record.getMessage()
    assert [file.name for file in tmp_path.iterdir()] == ["regular"]


@pytest.mark.parametrize("refused", ["stat", "open", "replace"])
def test_a_folder_that_this_user_may_not_enter_stops_nothing(
    refused, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, before = cache_folder("kind") / "file", getattr(Path, refused)

    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        if self.name.startswith(path.name):
            raise PermissionError(13, "Permission denied")
        return before(self, *args, **options)

    path.parent.mkdir(parents=True)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(Path, refused, refuse)
        write_cached(path, "text")
    [record] = caplog.records
    assert f"{path.parent} (Permission denied)" in record.getMessage()
    assert not [*path.parent.iterdir()]
