"""The kernels that all graphs share are compiled once."""

import pytest

from drafthead.backends.cpu.kernels import library

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")


def test_a_library_that_one_process_has_compiled_is_taken_by_the_next(monkeypatch) -> None:
    path = library.path_of(library.text())
    written = path.stat().st_mtime_ns
    monkeypatch.setattr(library, "compile_library", None)
    library.loaded.cache_clear()
    assert library.loaded() and path.stat().st_mtime_ns == written
    other = library.path_of(library.text() + "// of another version")
    assert other != path and not other.exists()
