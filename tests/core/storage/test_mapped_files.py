"""Tensors of a file read it where it lies, and take no memory once they are let go."""

from pathlib import Path
from weakref import ref

import torch

from drafthead.core.storage.mapped_files import let_go, map_file, mapped


def of_files() -> int:
    """Bytes of files in this process's memory."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssFile"))
    return 1024 * int(line.split()[1])


def test_pages_are_let_go_and_read_again(tmp_path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(torch.arange(4_000_000).numpy().tobytes())
    content = map_file(path)
    tensor, is_gone = torch.frombuffer(content, dtype=torch.int64, offset=8000), ref(content)
    expected, before = int(tensor.sum()), of_files()
    let_go(tensor)
    assert before - of_files() > 30_000_000
    assert int(tensor.sum()) == expected
    del tensor, content
    assert is_gone() is None


def test_memory_that_is_no_file_stays(tmp_path) -> None:
    (tmp_path / "small").write_bytes(b"12345678")
    content, other = map_file(tmp_path / "small"), torch.ones(10_000)
    let_go(other)
    assert other.sum() == 10_000 and content in mapped
