"""Windows of conversations and their answers: several at once where the source looks ahead."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Queue
from typing import Protocol, TypeAlias, runtime_checkable

from drafthead.core.errors import UserError
from drafthead.train.distillation.answer_source import AnswerSource, AnswersPrompts, Questions
from drafthead.train.distillation.dialogue import Dialogue, DialogueJob
from drafthead.train.settings import DistillSettings

# Told of answers: their tokens, and how many they are.
Count: TypeAlias = Callable[[int, int], None]


@runtime_checkable
class WindowSource(AnswersPrompts, Protocol):
    """A target that answers whole windows."""

    def answered(
        self, windows: Sequence[list[DialogueJob]], settings: DistillSettings, count: Count
    ) -> Iterator[list[Dialogue]]:
        """The conversations of each window with all their answers, in order."""


@dataclass
class _Window:
    """Conversations that are written together, and how many of them are not at their end."""

    dialogues: list[Dialogue]
    left: int


def answered(
    source: AnswerSource | WindowSource,
    windows: Sequence[list[DialogueJob]],
    settings: DistillSettings,
    count: Count,
) -> Iterator[list[Dialogue]]:
    """The conversations of each window with all their answers, in order.

    Raises UserError, with the row, for what the source cannot answer.
    """
    if isinstance(source, WindowSource):
        yield from source.answered(windows, settings, count)
        return
    groups = [windows] if source.ahead else [[window] for window in windows]
    for group in groups:
        yield from _Questions(source, group, settings, count).answered()


@dataclass
class _Questions:
    """The questions of some windows, which wait in a queue of their source."""

    source: AnswerSource
    windows: Sequence[list[DialogueJob]]
    settings: DistillSettings
    count: Count
    queue: Questions = field(default_factory=Queue)
    opened: deque[_Window] = field(default_factory=deque)  # and not given yet
    asked: dict[int, tuple[Dialogue, _Window]] = field(default_factory=dict)  # by number
    begun: int = 0  # windows
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of conversations

    def answered(self) -> Iterator[list[Dialogue]]:
        """The conversations of each window, in order, once they have all answers."""
        self._open()
        for answer in self.source.answers(self.queue, self.settings):
            assert isinstance(answer.id, int)
            dialogue, window = self.asked[answer.id]
            if answer.error is not None:
                raise UserError(f"{dialogue.conversation.where}: {answer.error}")
            dialogue.take(answer, self.source)
            self.count(len(answer.tokens), 1)
            following = dialogue.request(answer.id, self.source)
            if following is not None:
                self.queue.put(following)
            else:
                window.left -= 1
                del self.asked[answer.id]
            self._open()
            while self.opened and not self.opened[0].left:
                yield self.opened.popleft().dialogues

    def _open(self) -> None:
        """Ask the windows that are needed; None after the last question of all."""
        while self.begun < len(self.windows) and self.queue.qsize() < max(1, self.source.ahead):
            jobs = self.windows[self.begun]
            window = _Window([Dialogue(job, self.settings) for job in jobs], len(jobs))
            self.opened.append(window)
            self.begun += 1
            for dialogue in window.dialogues:
                number = next(self.numbers)
                self.asked[number] = dialogue, window
                self.queue.put(dialogue.request(number, self.source))
        if not self.asked:
            self.queue.put(None)
