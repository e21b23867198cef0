"""Writing files atomically, and the folder for what later runs can reuse."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def cache_folder() -> Path:
    """The user's folder for what later runs on this machine can reuse."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "drafthead"
