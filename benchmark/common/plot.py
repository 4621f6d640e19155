"""Pictures of measurements. Each picture file contains a digest of its data.

The background is opaque, so a picture is legible on a white page and on a dark page. The lines have different markers
and different colours, so a picture is also legible in grey print.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D00", "#56B4E9", "#000000", "#7A7A7A")
"""The palette of Okabe and Ito with a darker yellow. Colour-blind readers can distinguish these colours."""
MARKERS = "osD^vPX*"
DIGEST = re.compile(rb"data: ([0-9a-f]{64})")
STYLE = {
    **{"figure.facecolor": "#fdfdfd", "axes.facecolor": "#fdfdfd", "savefig.facecolor": "#fdfdfd", "font.size": 9},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#d8d8d8"},
    **{"svg.fonttype": "none", "svg.hashsalt": "xshare", "axes.axisbelow": True, "legend.frameon": False},
}


@dataclass(frozen=True)
class Line:
    """A named series of points.

    `errors` contains the error bar of each point: half the bar's height, or its lower and upper end.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float | tuple[float, float]] | None = None
    is_main: bool = False


@dataclass(frozen=True)
class Panel:
    """A diagram with labelled axes. If `rows` is given, the panel shows one horizontal bar of length `x` per row."""

    x_label: str
    y_label: str
    lines: Sequence[Line]
    title: str = ""
    rows: Sequence[str] = ()
    log_x: bool = False
    log_y: bool = False
    zero: float | None = None
    """The y value of a dashed reference line, or its x value if the panel shows bars."""


@dataclass(frozen=True)
class Picture:
    """Panels side by side. The note below them explains the error bars."""

    panels: Sequence[Panel]
    note: str = ""


def find_digest(picture: Picture) -> str:
    """Return the SHA-256 digest of the picture's data. The digest does not depend on the version of matplotlib."""
    return hashlib.sha256(json.dumps(asdict(picture), sort_keys=True).encode()).hexdigest()


def read_digest(path: Path) -> str | None:
    """Read the digest from a picture file. Return None if the file does not exist or contains no digest."""
    found = DIGEST.search(path.read_bytes()) if path.exists() else None
    return found[1].decode() if found else None


def draw(picture: Picture, path: Path) -> None:
    """Draw a picture into a .png or .svg file and print its path. Print a message if matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        print("No picture: matplotlib is not installed")
        return
    with matplotlib.rc_context(STYLE):
        tall = max([3.6, *(1.2 + 0.34 * len(panel.rows) for panel in picture.panels)])
        figure = Figure(figsize=(5.4 * len(picture.panels) + 0.6, tall), layout="constrained")
        axes = figure.subplots(1, len(picture.panels), squeeze=False, sharey=bool(picture.panels[0].rows))
        for panel, ax in zip(picture.panels, axes[0], strict=True):
            _draw_panel(panel, ax)
        if picture.note:
            figure.supxlabel(picture.note, fontsize=7, color="#444444")
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Description": f"data: {find_digest(picture)}", **({"Date": None} if path.suffix == ".svg" else {})}
        figure.savefig(path, dpi=140, metadata=metadata)
    print(f"Picture: {path}")


def _draw_panel(panel: Panel, ax: Any) -> None:
    for number, line in enumerate(panel.lines):
        color = COLORS[number % len(COLORS)]
        values = line.x if panel.rows else line.y
        bars = None if line.errors is None else _find_bars(values, line.errors)
        if panel.rows:
            ax.barh(range(len(panel.rows)), line.x, xerr=bars, color=color, height=0.6, capsize=3, ecolor="#222222")
        else:
            look = {"linewidth": 2.4 if line.is_main else 1.3, "zorder": 3 if line.is_main else 2, "label": line.name}
            marker = MARKERS[number % len(MARKERS)]
            ax.errorbar(line.x, line.y, bars, color=color, marker=marker, markersize=5, capsize=3, **look)
    ax.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
    if panel.rows:
        ax.set_yticks(range(len(panel.rows)), panel.rows)
        ax.set_ylim(len(panel.rows) - 0.5, -0.5)
    elif len(panel.lines) > 1:
        ax.legend(fontsize=8)
    if panel.log_x:
        ticks = sorted({x for line in panel.lines for x in line.x})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    if panel.log_y:
        ax.set_yscale("log", nonpositive="clip")
    if panel.zero is not None:
        (ax.axvline if panel.rows else ax.axhline)(panel.zero, color="#444444", linewidth=1, linestyle="--")


def _find_bars(values: Sequence[float], errors: Sequence[float | tuple[float, float]]) -> list[list[float]]:
    """Return the lengths of the error bars below the values, then above them.

    An unknown error has the length NaN, so matplotlib draws no bar.
    """
    pairs = zip(values, errors, strict=True)
    ends = [error if isinstance(error, (tuple, list)) else (value - error, value + error) for value, error in pairs]
    lengths = [(value - lower, upper - value) for value, (lower, upper) in zip(values, ends, strict=True)]
    return [[length if isfinite(length) else nan for length in side] for side in zip(*lengths, strict=True)]
