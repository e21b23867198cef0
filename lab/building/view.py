"""The display of a build at work: lines about its stages, their times and what works in them.

What the verbs print, progress bars aside, goes into `build.log`.
"""

import io
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Self, TextIO

from drafthead.lab.learning_curve import in_words

LOG = "build.log"
SECONDS_BETWEEN_LINES = 30
DRAWN = re.compile(r"\|[^|]*\| ")  # what a bar draws, between its share and its numbers


class Captured(io.TextIOBase):
    """A stream that the verbs print to: whole lines go to a file, a bar's last piece is kept."""

    def __init__(self, file: TextIO, on_bar: Callable[[str], None]):
        self.file, self.on_bar, self.piece = file, on_bar, ""

    def write(self, text: str) -> int:
        """Take what is printed; a bar begins its line again and again."""
        *lines, self.piece = (self.piece + text).split("\n")
        for line in lines:
            if words := DRAWN.sub(" ", line.rstrip("\r ").rpartition("\r")[2]):
                self.file.write(words + "\n")
        self.piece = self.piece.rstrip("\r ").rpartition("\r")[2]
        if self.piece:
            self.on_bar(DRAWN.sub(" ", self.piece))
        return len(text)

    def flush(self) -> None:
        """Write what is there."""
        self.file.flush()


class View:
    """The stages of a build, as lines on standard output."""

    def __init__(self, folder: Path, stages: Mapping[str, str], about: Callable[[], str]):
        """`about` says what is known of the head so far, or nothing."""
        self.folder, self.stages, self.about = folder, stages, about
        self.output = sys.stdout
        self.expected: dict[str, float] = {}
        self.began = self.said = time.monotonic()
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        """Take over standard output and standard error."""
        file = self.stack.enter_context((self.folder / LOG).open("a", encoding="utf-8"))
        captured = Captured(file, self._on_bar)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                self.stack.callback(handler.setStream, handler.stream)
                handler.setStream(captured)
        self.stack.enter_context(redirect_stdout(Captured(file, self._on_bar)))
        self.stack.enter_context(redirect_stderr(captured))
        return self

    def __exit__(self, *_: object) -> None:
        """Give standard output back."""
        self.stack.close()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage at work."""
        self.began = time.monotonic()
        place = f"{list(self.stages).index(name) + 1}/{len(self.stages)}"
        expected = self.expected.get(name)
        about = f", about {in_words(expected)}" if expected else ""
        self.say(f"{place} {self.stages[name]}{about}")
        yield
        self.say(f"{place} done in {in_words(self.seconds)}")

    @property
    def seconds(self) -> float:
        """Since the stage began."""
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        """Print a line."""
        self.said = time.monotonic()
        print(text, file=self.output, flush=True)

    def _on_bar(self, bar: str) -> None:
        if time.monotonic() - self.said > SECONDS_BETWEEN_LINES:
            about = self.about()
            self.say(f"    {bar}" + (f"; {about}" if about else ""))
