"""Plots: panels, and one legend that lies below the data and not over it."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PANEL = (5.5, 4.0)  # inches
DPI = 120


def make_figure(title: str, rows: int = 1, columns: int = 1, share_y: bool = False) -> tuple[Figure, list[list[Axes]]]:
    """A figure of rows x columns panels under a title that says what is seen."""
    size = (PANEL[0] * max(columns, 1.5), PANEL[1] * rows + 1.0)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, sharey=share_y)
    figure.suptitle(title, fontsize=11)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes.tolist()


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure, with one legend of all its panels below them."""
    named: dict[str, Artist] = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        named.update(zip(labels, handles, strict=True))
    if named:
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=min(3, len(named)), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
