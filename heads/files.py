"""Writing files atomically."""

import secrets
from contextlib import suppress
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of it.

    Of several writers at once the last one wins. Raises OSError, and leaves nothing behind then.
    """
    # Another name for each writer, or they would rename each other's files. Not from `tempfile`,
    # whose files no other user may read.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
