"""Tables in the terminal and pictures, for the verbs that measure."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

matplotlib.use("agg")

WIDE = 130  # columns of a table where no terminal says how many there are
OURS, THEIRS, BASELINE = "#2a6f97", "#b08968", "#6c757d"


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> None:
    """Show a table and notes below it; in a file or a pipe it is as wide as it is."""
    table = Table(title=title, box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture so that a crash leaves the old one or the new one, and free its memory."""
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)
    temporary.replace(path)
