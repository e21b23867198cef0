"""Files that are written whole or not at all, and the folder of what later runs can use again."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def cache_folder() -> Path:
    """Where the user's account keeps what later runs on this machine can use again."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "drafthead"
