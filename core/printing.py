"""Text that is not trusted, from files and models, made fit to print: nothing is hidden in it."""

from collections.abc import Iterator
from contextlib import contextmanager

from drafthead.core.errors import UserError

LONGEST_VALUE, LONGEST_SENTENCE = 80, 480  # characters


def printable(text: str, longest: int = LONGEST_SENTENCE) -> str:
    """`text` with control characters escaped and, if it is long, without its middle.

    Line breaks, terminal sequences, marks that turn the direction of writing and halves of
    surrogate pairs become escapes such as ``\\x1b``.
    """
    # Shortened before too, so that megabytes are not escaped.
    kept = without_middle(text, longest)
    return without_middle(visible(kept, besides=""), longest)


def visible(text: str, besides: str = "\n\t") -> str:
    """A text for a terminal: control characters escaped, except those `besides`."""
    return "".join(
        c if c.isprintable() or c in besides else c.encode("unicode_escape").decode() for c in text
    )


def without_middle(text: str, longest: int) -> str:
    """At most `longest` characters of `text`, from both of its ends."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}…{text[len(text) - (longest - half - 1) :]}"


def shown(value: object) -> str:
    """A value from a file, for a sentence."""
    return printable(repr(value), LONGEST_VALUE)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Make the message of a UserError raised inside fit to print."""
    try:
        yield
    except UserError as error:
        raise UserError(printable(str(error))) from error
