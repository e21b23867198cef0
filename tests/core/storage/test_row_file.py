"""Files that several processes write: each row is whole, whatever becomes of its writer."""

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from distilled import SETTINGS
from forks import forked, status_of
from tiny import byte_tokenizer, tiny_llama

from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.storage.files import plain_path, write_text
from drafthead.core.storage.row_file import RowFile
from drafthead.core.target.target import Target
from drafthead.heads.formats.checkpoint import SHIPPED_HEADS
from drafthead.infer import Decoder
from drafthead.infer.loading.loaded import named_draft, path_of
from drafthead.serve.recording import Recorder, Source
from drafthead.train.data.row_sources import rows_of, source_digest
from drafthead.train.distillation.distilled_file import DistilledFile

LONG = "long " * 2000


def decoder() -> Decoder:
    tokenizer = byte_tokenizer()
    return Decoder(Target(tiny_llama(vocab_size=len(tokenizer)), tokenizer))


class Rows:
    """Rows of any kind."""

    def __init__(self, path: Path, alone: bool = False, private: bool = False):
        self.file = RowFile(path, alone=alone, private=private)

    def write(self, text: str) -> None:
        self.file.append(json.dumps({"id": text}).encode() + b"\n")

    def close(self) -> None:
        self.file.close()


class Records(Rows):
    """Answers of a server."""

    def __init__(self, path: Path):
        self.recorder = Recorder(path, 1 << 30, decoder(), "tiny")
        self.file = self.recorder.file

    def write(self, text: str) -> None:
        request = SimpleNamespace(
            end_ids=frozenset(), sampling=SamplingConfig(), seeds=[0], prompts=[[1]]
        )
        self.recorder._write(Source([{"role": "user", "content": text}], {}), request, [70], "stop")

    def close(self) -> None:
        self.recorder.close()


class Resumed(Rows):
    """The rows of a run that is continued: answers of a distillation."""

    def __init__(self, path: Path):
        self.run = DistilledFile(path, SETTINGS).__enter__()
        self.run.start()
        self.run.resume()
        self.file = self.run.file

    def write(self, text: str) -> None:
        number = max(self.run.written.batches, default=-1) + 1
        self.run.append(number, [{"id": text, "messages": [], "question": text}], {})


WRITERS: dict[str, Callable[[Path], Rows]] = {
    "rows of several": Rows,
    "rows of one": lambda path: Rows(path, alone=True),
    "private rows": lambda path: Rows(path, private=True),
    "records": Records,
    "answers of a distillation": Resumed,
}


def rows(path: Path) -> list[dict]:
    """All rows, of which none is broken."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture(params=WRITERS)
def make(request) -> Callable[[Path], Rows]:
    return WRITERS[request.param]


@contextmanager
def most_bytes(size: int) -> Iterator[None]:
    """A disk that has no room for files of more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_two_writers_add_whole_rows_or_the_second_is_refused(make, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    first = make(path)
    if first.file.alone:
        with pytest.raises(UserError, match="another process is writing"):
            make(path)
        first.close()
        make(path).close()
        return

    def write() -> None:
        for _ in range(20):
            second.write(LONG)

    second = make(path)
    children = [forked(write)[0] for _ in range(2)]
    for _ in range(20):
        first.write(LONG)
    assert [status_of(child) for child in children] == [0, 0]
    assert len(rows(path)) == 60


@pytest.mark.parametrize("whole", [0, 2], ids=["first", "last"])
@pytest.mark.parametrize("torn", [8, 1])
def test_a_torn_row_is_cut_off(make, tmp_path, torn, whole) -> None:
    path = tmp_path / "rows.jsonl"
    writer = make(path)
    for _ in range(whole + 1):
        writer.write("a")
    writer.close()
    os.truncate(path, path.stat().st_size - torn)
    writer = make(path)
    writer.write("b")
    writer.close()
    assert len(rows(path)) == whole + 1 and "b" in json.dumps(rows(path)[-1])


def test_a_full_disk_ends_the_writing_and_leaves_whole_rows(make, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    writer = make(path)
    writer.write("a")
    with most_bytes(path.stat().st_size + 1000):
        for _ in range(2):
            with pytest.raises(UserError, match=r"rows.jsonl cannot be written: File too large"):
                writer.write(LONG)
        assert len(rows(path)) == 1
        writer.close()
    writer = make(path)
    writer.write("b")
    writer.close()
    assert len(rows(path)) == 2


def test_a_killed_writer_leaves_rows_to_go_on_with(make, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"

    def write() -> None:
        writer = make(path)
        while True:
            writer.write(LONG)

    child, _ = forked(write)
    while not path.exists() or path.stat().st_size < 200_000:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    assert status_of(child) != 0
    writer = make(path)
    writer.write("b")
    writer.close()
    assert len(rows(path)) > 9 and "b" in json.dumps(rows(path)[-1])


def test_only_its_owner_reads_a_private_file(make, tmp_path, monkeypatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch(mode=0o644)
    path.chmod(0o644)
    writer = make(path)
    writer.write("a")
    assert path.stat().st_mode & 0o777 == (0o600 if writer.file.private else 0o644)

    def others(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod" if writer.file.private else "open", others)
    writer.close()
    with pytest.raises(UserError, match="rows.jsonl cannot be written: Operation not permitted"):
        make(path).write("b")


def test_what_is_no_file_of_rows_is_left_as_it_is(make, tmp_path) -> None:
    for text in ("notes", "notes\nmore", '{"name": "a settings file"}', "\0" * 100):
        path = tmp_path / "notes"
        path.write_text(text)
        with pytest.raises(UserError, match="another file|no answers of this model|exists without"):
            make(path).write("a")
        assert path.read_text() == text


@pytest.mark.parametrize("name", [name for name in WRITERS if WRITERS[name] is not Resumed])
def test_a_folder_that_is_not_there_is_refused(tmp_path, name) -> None:
    with pytest.raises(UserError, match="cannot be written: No such file"):
        WRITERS[name](tmp_path / "missing" / "rows.jsonl")


# ---- devices and pipes ---------------------------------------------------------------------------


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def link(folder: Path) -> Path:
    (folder / "link").symlink_to("/dev/zero")
    return folder / "link"


def listening(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
    return folder / "socket"


def within(folder: Path) -> Path:
    (folder / "head").mkdir()
    (folder / "head" / "config.json").write_text("{}")
    os.mkfifo(folder / "head" / "model.safetensors")
    return folder / "head"


STRANGE: dict[str, Callable[[Path], Path]] = {
    "a pipe": pipe, "a link to a device": link, "a socket": listening, "a pipe in a folder": within,
    "a full device": lambda _: Path("/dev/full"), "an endless one": lambda _: Path("/dev/zero"),
    "a long name": lambda folder: folder / ("a" * 5000), "a zero": lambda folder: folder / "a\0b",
}  # fmt: skip
# Whatever is given the path of a file or of a folder.
OPENS: dict[str, Callable[[Path], object]] = {
    **WRITERS,
    "a text": lambda path: write_text(path, "text"),
    "--draft": lambda path: named_draft(str(path)),
    "--draft head": lambda path: named_draft(f"head:{path}"),
    "--draft model": lambda path: named_draft(f"model:{path}"),
    "--draft ngrams": lambda path: named_draft(f"ngrams:{path}"),
    "--data": lambda path: list(rows_of(str(path))),
    "a digest": lambda path: source_digest(str(path)),
}


@pytest.mark.parametrize("draft", ["lookup", "answers", "mtp", "layers:0", *SHIPPED_HEADS])
def test_a_draft_without_a_path_reads_nothing_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    within(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert named_draft(draft)


@pytest.mark.parametrize("opens", OPENS)
@pytest.mark.parametrize("strange", STRANGE)
def test_what_is_neither_file_nor_folder_is_refused(tmp_path, strange, opens) -> None:
    path = STRANGE[strange](tmp_path)
    with pytest.raises(UserError, match=r"neither a file nor a folder|cannot be (read|written)"):
        OPENS[opens](path)
    assert path.name == "a\0b" or len(path.name) > 4000 or path.exists()


def test_paths_outside_of_allowed_folders_are_refused(tmp_path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    for folder in (allowed, outside):
        folder.mkdir()
    (allowed / "link").symlink_to(outside)
    for path in (
        outside,
        allowed / ".." / "outside",
        allowed / "link",
        Path("owner/name"),
        tmp_path,
    ):
        with pytest.raises(UserError, match="in none of the folders that are allowed"):
            plain_path(path, [allowed])
    for path in (allowed, allowed / "head", allowed / "not" / ".." / "head"):
        assert plain_path(path, [tmp_path / "other", allowed]) == path


def test_the_path_of_a_draft_is_what_follows_its_kind() -> None:
    paths = {"head:a/b": "a/b", "model:a": "a", "ngrams:a": "a", "a/b": "a/b", "lookup": None,
             "answers": None, "mtp": None, "layers:0-3": None, "lookups": "lookups",
             **dict.fromkeys(SHIPPED_HEADS)}  # fmt: skip
    assert {name: path_of(name) and str(path_of(name)) for name in paths} == paths
