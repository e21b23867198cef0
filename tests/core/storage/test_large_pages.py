"""Memory that a thread touches before somebody takes it."""

import mmap

import pytest

from drafthead.core.storage import large_pages
from drafthead.core.storage.large_pages import PAGE, Ahead, new_mapping

SIZE = 3 * PAGE

linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux has large pages")


@pytest.fixture
def ahead(monkeypatch) -> Ahead:
    """Memory that nothing has touched yet."""
    made = Ahead()
    monkeypatch.setattr(large_pages, "ahead", made)
    return made


@linux
@pytest.mark.parametrize("is_touched", [True, False])
def test_what_is_touched_ahead_is_given_once(ahead: Ahead, is_touched: bool) -> None:
    ahead.touch(SIZE)
    mapping = ahead.mapping
    if is_touched:
        ahead.thread.join()
    given = new_mapping(SIZE)
    assert given is mapping and not ahead.thread.is_alive()  # or it would write over what is there
    assert given[:] == bytes(len(given))
    assert new_mapping(SIZE) is not mapping


@linux
def test_what_is_too_small_is_not_given(ahead: Ahead) -> None:
    ahead.touch(SIZE)
    assert len(new_mapping(9 * SIZE)) >= 9 * SIZE
    assert ahead.taken() is None


def test_systems_without_large_pages_touch_nothing(ahead: Ahead, monkeypatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    ahead.touch(SIZE)
    assert ahead.taken() is None
