"""What a build shows while it works: its stages with their times, or plain lines of text.

What the verbs print, progress bars aside, goes into `build.log`.
"""

import io
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from drafthead.lab.learning_curve import in_words

LOG = "build.log"
SECONDS_BETWEEN_LINES = 30


class Captured(io.TextIOBase):
    """Where the verbs print to: whole lines go to a file, the last piece of a bar is kept."""

    def __init__(self, file: TextIO, on_bar: Callable[[str], None], terminal: bool):
        """With `terminal` bars are drawn as often as on one."""
        self.file, self.on_bar, self.terminal, self.piece = file, on_bar, terminal, ""

    def isatty(self) -> bool:
        """Tell whether bars are drawn often."""
        return self.terminal

    def write(self, text: str) -> int:
        """Take what is printed; a bar begins its line again and again."""
        *lines, self.piece = (self.piece + text).split("\n")
        for line in lines:
            if words := line.rstrip("\r ").rpartition("\r")[2]:
                self.file.write(words + "\n")
        self.piece = self.piece.rstrip("\r ").rpartition("\r")[2]
        if self.piece:
            self.on_bar(self.piece)
        return len(text)

    def flush(self) -> None:
        """Write what is there."""
        self.file.flush()


class View:
    """The stages of a build, on the terminal that standard output is, or as lines."""

    def __init__(self, folder: Path, stages: Mapping[str, str], about: Callable[[], str]):
        """`about` says what is known of the head so far, or nothing."""
        self.folder, self.stages, self.about = folder, stages, about
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.taken: dict[str, float] = {}
        self.expected: dict[str, float] = {}
        self.at, self.began, self.bar = "", time.monotonic(), ""
        self.said = time.monotonic()
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        """Take over standard output and standard error."""
        file = self.stack.enter_context((self.folder / LOG).open("a", encoding="utf-8"))
        is_live = self.console.is_terminal
        if is_live:
            live = Live(
                console=self.console, get_renderable=self.table, refresh_per_second=2,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self.stack.enter_context(live)
        captured = Captured(file, self._on_bar, is_live)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                self.stack.callback(handler.setStream, handler.stream)
                handler.setStream(captured)
        self.stack.enter_context(redirect_stdout(Captured(file, self._on_bar, False)))
        self.stack.enter_context(redirect_stderr(captured))
        return self

    def __exit__(self, *_: object) -> None:
        """Give standard output back."""
        self.stack.close()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage at work."""
        self.at, self.began, self.bar = name, time.monotonic(), ""
        number = list(self.stages).index(name) + 1
        if not self.console.is_terminal:
            expected = self.expected.get(name)
            about = f", about {in_words(expected)}" if expected else ""
            self.say(f"{number}/{len(self.stages)} {self.stages[name]}{about}")
        yield
        self.taken[name] = self.seconds
        if not self.console.is_terminal:
            self.say(f"{number}/{len(self.stages)} done in {in_words(self.seconds)}")
        self.at = ""

    @property
    def seconds(self) -> float:
        """Since the stage began."""
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        """Print a line, above the stages."""
        self.said = time.monotonic()
        self.console.print(Text(text))  # not `markup=False`: the live table would lose its own

    def left(self) -> float:
        """Seconds that all is expected to take."""
        ahead = [self.expected.get(name, 0) for name in self.stages if name not in self.taken]
        return max(0.0, sum(ahead) - (self.seconds if self.at else 0))

    def table(self) -> Table:
        """The stages now."""
        found = Table(box=None, show_header=False, pad_edge=False)
        for name, words in self.stages.items():
            if name in self.taken:
                found.add_row("[green]done[/]", words, in_words(self.taken[name]))
            elif name == self.at:
                found.add_row("[bold]now[/]", f"[bold]{words}[/]", in_words(self.seconds))
                bar = self.bar[-60:].replace("[", "(").replace("]", ")")
                found.add_row("", f"[dim]{bar}[/]", "")
            else:
                expected = self.expected.get(name)
                found.add_row("", words, f"[dim]{in_words(expected)}[/]" if expected else "")
        found.add_row("", self.about(), f"[bold]{in_words(self.left())} left[/]")
        return found

    def _on_bar(self, bar: str) -> None:
        self.bar = bar
        late = time.monotonic() - self.said > SECONDS_BETWEEN_LINES
        if late and not self.console.is_terminal:
            about = self.about()
            self.say(f"    {bar}" + (f"; {about}" if about else ""))
