"""Records of stand-ins on paper: the table and the plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmark.common.plot import make_figure, save_figure
from benchmark.common.table import Table
from benchmark.quality.front.report import experts_for

ALONE = ("as published", "own_share and squared")
"""The plans alone, with which stand-ins are compared."""
MODELS = ("a quarter of hidden", "as wide as hidden")
"""The width of the experts of the two records' models."""
NOTE = """\
Size: of a stand-in, in bytes of an expert. Awake, used: experts and different stand-ins of a layer and step; loaded:
both and shared bases, in experts' worth of bytes. Loss: cross-entropy above vanilla's on the same tokens, in
thousandths of a nat a token, ± the standard error of the paired differences. Saved, below 0 where it is more: how much
less than the plan alone needs for the same loss, on the line between two of its budgets, ± the error of both losses,
paired, sequence by sequence (jackknife); empty beyond its budgets. Of the budgets of each kind and size the one that
saves the most experts over the plan as published is shown; the last columns are of the one that saves the most bytes,
which flatters it."""
Points = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Saved:
    """A share less of what the plan alone loads, and its standard error."""

    share: float
    error: float

    def __str__(self) -> str:
        return f"{self.share:+.0%} ± {self.error:.0%}"


def tabulate_stand_ins(*records: Points, models: Sequence[str] = MODELS) -> Table:
    """A row a model, kind and size of stand-ins; `models` name the records."""
    rows = []
    for model, points in zip(models, records, strict=True):
        for kind in dict.fromkeys(point["kind"] for point in points.values()):
            if kind not in ALONE:
                rows.append([model, *_row(points, kind)])
    headings = ["experts", "stand-ins", "size", "awake", "used", "loaded", "loss"]
    for name in ALONE:
        headings += [f"experts saved, {name}", f"bytes saved, {name}"]
    headings += [f"most bytes saved, {name}" for name in ALONE]
    return Table("Stand-ins for dropped experts", headings, rows, NOTE, text_columns=2)


def _row(points: Points, kind: str) -> list[str]:
    members = [point for point in points.values() if point["kind"] == kind]
    saved = {name: [save(point, points, name) for point in members] for name in ALONE}

    def experts_saved(number: int) -> float:
        found = saved[ALONE[0]][number]
        return found[0].share if found else -1.0

    number = max(range(len(members)), key=experts_saved)
    best = members[number]
    cells = [f"{best['own']:.1%}", *(f"{best[key]:.1f}" for key in ("awake", "used", "worth")), format_deltas(best)]
    for name in ALONE:
        found = saved[name][number]
        cells += [str(one) for one in found] if found else ["", ""]
    for name in ALONE:
        most = max((one[1] for one in saved[name] if one), key=lambda one: one.share, default="")
        cells.append(str(most))
    return [kind, *cells]


def format_deltas(point: Mapping[str, Any]) -> str:
    """The mean loss in millinats, with its error."""
    deltas = point["deltas"]
    return f"{fmean(deltas) * 1000:+.1f} ± {stdev(deltas) / len(deltas) ** 0.5 * 1000:.1f}"


def save(point: Mapping[str, Any], points: Points, name: str) -> tuple[Saved, Saved] | None:
    """Experts and bytes that a point saves over the plans alone of this name; None where they have not its loss."""
    rungs = [one for one in points.values() if one["kind"] == name]
    needed = _needed(point, rungs)
    if needed is None:
        return None
    # Leave out each sequence in turn; where that leaves the ladder, the end of the ladder is what is known.
    count = len(point["deltas"])
    parts = [_needed(point, rungs, without) or needed for without in range(count)]
    found = []
    for loaded in (point["awake"], point["worth"]):
        shares = [1 - loaded / one for one in parts]
        error = ((count - 1) / count * sum((share - fmean(shares)) ** 2 for share in shares)) ** 0.5
        found.append(Saved(1 - loaded / needed, error))
    return found[0], found[1]


def _needed(point: Mapping[str, Any], rungs: Sequence[Mapping[str, Any]], without: int | None = None) -> float | None:
    """The experts with which the plan alone has the point's loss, on all sequences but one."""

    def loss(one: Mapping[str, Any]) -> float:
        deltas = one["deltas"]
        return fmean(deltas) if without is None else (sum(deltas) - deltas[without]) / (len(deltas) - 1)

    return experts_for(loss(point), sorted((rung["awake"], loss(rung)) for rung in rungs))


def plot_stand_ins(path: Path, points: Points, title: str) -> None:
    """The loss over awake experts and over what is loaded: a line a kind and size, the plans alone in black."""
    kinds = list(dict.fromkeys(point["kind"] for point in points.values()))
    figure, (axes,) = make_figure(title, 1, 2, share_y=True)
    for axis, (key, words) in zip(
        axes, (("awake", "active experts"), ("worth", "experts' worth of bytes")), strict=True
    ):
        for number, kind in enumerate(kinds):
            members = sorted((one for one in points.values() if one["kind"] == kind), key=lambda one: one[key])
            found = [one[key] for one in members], [fmean(one["deltas"]) * 1000 for one in members]
            style = "k" + (":", "-")[number] if kind in ALONE else "s--" if kind.startswith("shared") else "o-"
            axis.plot(*found, style, label=kind)
        axis.set_xlabel(f"{words} a layer and step")
        axis.set_yscale("symlog", linthresh=1)  # linear below one millinat, where the noise is
    axes[0].set_ylabel("cross-entropy above vanilla's, millinats a token")
    save_figure(figure, path)
