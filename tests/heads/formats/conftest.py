"""Undamaged checkpoints of every format, for tests that damage copies of them."""

from pathlib import Path

import pytest
from damaged import build_examples


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undamaged checkpoints by name, and their target."""
    root = tmp_path_factory.mktemp("whole")
    build_examples(root)
    return root
