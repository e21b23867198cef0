"""Texts of letters for lookup: one token a letter."""

from drafthead.infer.drafters.history import History


def letters(text: str) -> list[int]:
    """The tokens of a text."""
    return [*map(ord, text)]


def past_of(text: str) -> History:
    """A row that has this text."""
    past = History(ord(text[0]))
    for token in letters(text[1:]):
        past.append(token)
    return past
