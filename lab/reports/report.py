"""A report: tables and notes, shown in the terminal and written as JSON, Markdown and a picture."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib
from jinja2 import Environment
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from drafthead.core.storage.files import replacing, write_json, write_text

matplotlib.use("agg")

Columns: TypeAlias = Mapping[str, Callable[[Any], str]]

WIDE = 250  # characters in a line, at most, when the output is not a terminal
OURS, THEIRS, BASELINE = "#2a6f97", "#b08968", "#6c757d"  # colours that all pictures share


@dataclass(frozen=True)
class Table:
    """A table of text; cells of `words` are sentences: on the left, on several lines, apart."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False

    def markdown(self) -> str:
        """The table as Markdown, without its title."""
        lines = ["| " + " | ".join(self.columns) + " |", "|---" * len(self.columns) + "|"]
        return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in self.rows])


def table_of(title: str, columns: Columns, rows: Iterable[Any]) -> Table:
    """A table of rows of any kind; each column is a title and what makes its cells."""
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    return Table(title, list(columns), cells)


@dataclass(frozen=True)
class Report:
    """The findings of a verb: tables and notes for the terminal, `content` for JSON.

    With an `intro`, its first lines, there is a Markdown file. `draw` makes the picture, if there
    is one.
    """

    tables: Sequence[Table]
    notes: Sequence[str]
    content: Mapping[str, Any]
    intro: Sequence[str] = ()
    draw: Callable[[], Figure] | None = None

    def show(self) -> None:
        """Print the tables, and the notes below the last one."""
        *first, last = self.tables
        for table in first:
            print_table(table)
        print_table(last, self.notes)

    def write(self, file: Path) -> None:
        """Write the JSON file, and the others beside it; a crash leaves the old or the new one."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, self.content)
        names = [str(file)]
        if self.intro:
            parts = [*self.intro]
            for table in self.tables:
                parts += [f"{table.title}:" if table.title else "", table.markdown()]
            text = "\n\n".join(part for part in (*parts, *self.notes) if part)
            write_text(file.with_suffix(".md"), text + "\n")
            names.append(file.with_suffix(".md").name)
        if self.draw is not None:
            with replacing(file.with_suffix(".png")) as temporary:
                temporary.write_bytes(png(self.draw()))
            names.append(file.with_suffix(".png").name)
        print(f"written: {', '.join(names)}")


def number(value: float | None, digits: int = 2) -> str:
    """A number as text; a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def print_table(table: Table, notes: Sequence[str] = ()) -> None:
    """Print a table, if it has rows, and notes below it."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=WIDE)
    if table.rows:
        words = table.words
        shown = RichTable(title=table.title, box=SIMPLE_HEAD, show_lines=words)
        for index, column in enumerate(table.columns):
            on_left = index == 0 or words
            shown.add_column(column, justify="left" if on_left else "right", no_wrap=not words)
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)


def page(template: str, values: Mapping[str, Any]) -> str:
    """A page of this folder with its values; all text in them is escaped."""
    text = files("drafthead.lab.reports").joinpath(template).read_text("utf-8")
    return Environment(autoescape=True).from_string(text).render(values)


def machine_line(about: Mapping[str, Any]) -> str:
    """The machine, number type and prompts of a race, as a report begins with them."""
    machine = about["machine"]
    return (
        f"{machine['processor']}, {machine['threads']} thread{'s' * (machine['threads'] != 1)}, "
        f"{about['dtype']}, "
        f"{about['prompts']} prompts"
    )


def png(figure: Figure) -> bytes:
    """A picture as a PNG file; its memory is free then."""
    file = BytesIO()
    figure.tight_layout()
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)
    return file.getvalue()
