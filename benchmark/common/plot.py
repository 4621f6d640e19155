"""Figures: panels, one legend that lies below the data and not over it, and speed over active experts."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark.common.comparison import Comparison
from benchmark.common.summary import Spread, fit_line

PANEL = (5.5, 4.0)  # inches
DPI = 120
SPEED = {"throughput": "output tokens/s", "tpot_ms": "time per output token, ms"}


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


def plot_speed(path: Path, comparisons: Sequence[Comparison], title: str = "Speed over active experts") -> None:
    """Throughput and time per output token over active experts, a row of panels a comparison: medians and quartiles,
    and the line through points that are comparable, of which it takes five.
    """
    figure, axes = make_figure(title, len(comparisons), len(SPEED))
    for row, comparison in zip(axes, comparisons, strict=True):
        for axis, name in zip(row, SPEED, strict=True):
            _plot(axis, comparison, name)
    save_figure(figure, path)


def _plot(axis: Axes, comparison: Comparison, name: str) -> None:
    points = []
    for number, (one, row, experts) in enumerate(
        zip(comparison.series, comparison.summaries, comparison.active, strict=True)
    ):
        value: Spread = getattr(row, name)
        color = f"C{number}"
        if experts is None:  # nobody counted: a level to compare with
            axis.axhline(value.median, linestyle=":", color=color, label=row.name)
            continue
        error = [[value.median - value.lower], [value.upper - value.median]]
        axis.errorbar(experts, value.median, yerr=error, fmt="o", capsize=3, color=color, label=row.name)
        points.append((one.variant.args, experts, value.median))
    x, y = [experts for _, experts, _ in points], [value for *_, value in points]
    # What drafts are accepted, and other flags, change the speed at as many experts.
    comparable = len({args for args, *_ in points}) == 1 and not any(row.accept_length for row in comparison.summaries)
    fit = fit_line(x, y) if comparable else None
    title = f"{comparison.workload.model.name}, median and quartiles of {comparison.rounds} rounds"
    if fit is not None:
        ends = [min(x), max(x)]
        axis.plot(ends, [fit.intercept + fit.slope * end for end in ends], "--", color="grey", zorder=0)
        title += f"\nline: {fit.intercept:.4g} {fit.slope:+.3g} an expert, R² = {fit.r_squared:.2f}"
    axis.set_title(title, fontsize=9)
    axis.set(xlabel="active experts a layer and step", ylabel=SPEED[name])
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
