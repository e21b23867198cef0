"""Tables, in the terminal and as Markdown."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDE = 250  # characters in a line, at most, when the output is not a terminal


def number(value: float | None, digits: int = 2) -> str:
    """A number as text; a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> None:
    """Print a table, if it has rows, and notes below it."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    if rows:
        table = Table(title=title, box=SIMPLE_HEAD)
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
