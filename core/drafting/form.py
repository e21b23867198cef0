"""The drafts that rows want: by whom they are made, and the forms that their answers keep to.

A form leaves some tokens no choice: these can be drafted for nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

# By row, the names of what may draft for it; None: all that there is, for a row or for all of them.
Wanted: TypeAlias = Sequence[frozenset[str] | None] | None


def wanting(wanted: Wanted, names: Collection[str]) -> list[bool] | None:
    """The rows that want drafts of one of these names; None: all do."""
    if wanted is None:
        return None
    return [own is None or not own.isdisjoint(names) for own in wanted]


class Forced(NamedTuple):
    """The tokens that a form demands next."""

    sure: list[int]  # tokens, each of them the only one that is allowed
    likely: list[list[int]]  # ways to write the text that must follow these, of which one may come


class AnswerForm(ABC):
    """A form, which is a logits processor as well: it allows an answer the tokens that keep to it.

    A wrong draft costs a node and changes no answer, so a form may guess.
    """

    @abstractmethod
    def forced(self, answer: Sequence[int]) -> Forced:
        """Return what must follow an answer's tokens so far; nothing where there is a choice."""

    @abstractmethod
    def legal(self, answer: Sequence[int], tokens: Sequence[int]) -> int:
        """Count how many of these tokens may follow the answer one after the other."""


def form_of(processors: Iterable[object]) -> AnswerForm | None:
    """The form that some logits processors keep an answer to, if there is one."""
    return next((each for each in processors if isinstance(each, AnswerForm)), None)


class RowForm(NamedTuple):
    """The form of a row, and its answer's tokens so far."""

    form: AnswerForm
    answer: Sequence[int]


# By row, the forms of answers; None: of a row without one, or where no row has one.
Forms: TypeAlias = Sequence[RowForm | None] | None
