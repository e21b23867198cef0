"""Pictures: the colours that all share, and saving."""

from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

matplotlib.use("agg")

OURS, THEIRS, BASELINE = "#2a6f97", "#b08968", "#6c757d"


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture and free its memory; after a crash the old or the new one is there."""
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)
    temporary.replace(path)
