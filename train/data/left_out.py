"""The unused part of a data set, rows and columns: counted, and the first ones named."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from drafthead.core.errors import UserError

logger = logging.getLogger(__name__)

NAMED = 5  # rows; the others are only counted


class UnusableRowError(UserError):
    """A row that cannot be used; the others can."""


@dataclass
class LeftOut:
    """Counts the rows of a data set that were left out, for the user to know."""

    strict: bool = False  # the first unusable row is an error
    rows: int = 0  # all that were read
    unusable: int = 0  # rows that cannot be used
    problems: list[str] = field(default_factory=list)  # of the first of these
    unread: Counter[str] = field(default_factory=Counter)  # what nobody reads, in how many rows
    split: int = 0  # rows that were split at turns
    parts: int = 0  # sequences that these have become
    fixed: int = 0  # rows with several turns whose prompts the template does not make
    cut: int = 0  # sequences that were cut, those that are `too_late` included
    too_late: int = 0  # sequences that were cut before anything that teaches
    first_too_late: str = ""  # the place of the first of these

    def leave(self, error: UnusableRowError) -> None:
        """Leave out the row that an error is about; with `strict` raise it instead."""
        if self.strict:
            raise UserError(f"{error} (strict: no row may be left out)") from error
        self.unusable += 1
        if len(self.problems) < NAMED:
            self.problems.append(_printable(str(error)))

    def note_unread(self, names: Iterable[str]) -> None:
        """Count what of one row is not read."""
        self.unread.update(map(_printable, names))

    def sentences(self, max_length: int | None = None) -> list[str]:
        """All of it in words; `max_length` is that of sequences, if they have one."""
        sentences = []
        if self.unusable:
            named = "\n  ".join(self.problems)
            others = f"\n  and {self.unusable - len(self.problems)} more"
            sentences.append(
                f"{self.unusable} of {self.rows} rows are left out; the first: {named}"
                f"{others if self.unusable > len(self.problems) else ''}"
            )
        if self.unread:
            listed = ", ".join(f"{name} ({count} rows)" for name, count in self.unread.items())
            sentences.append(f"not read: {listed}")
        if self.split:
            sentences.append(
                f"{self.split} of {self.rows} rows are longer than {max_length} tokens and are "
                f"split at turns into {self.parts} sequences"
            )
        if self.fixed:
            sentences.append(
                f"{self.fixed} of {self.rows} rows are longer than {max_length} tokens and cannot "
                "be split: their prompts are not what the chat template makes of their messages"
            )
        if self.cut:
            first = f" (the first is {self.first_too_late})" if self.too_late else ""
            sentences.append(
                f"{self.cut} sequences that cannot be split are cut to {max_length} tokens, "
                f"{self.too_late} of them dropped because less than two tokens of an "
                f"answer were left{first}"
            )
        return sentences

    def tell(self, source: str) -> None:
        """Log what was left out of a source."""
        for sentence in self.sentences():
            logger.warning("%s: %s", source, sentence)


def _printable(text: str) -> str:
    """The text with halves of characters, which no terminal writes, as their numbers."""
    return text.encode(errors="backslashreplace").decode()
