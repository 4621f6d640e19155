"""A record of tuning on paper: the table and the plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.common.plot import make_figure, save_figure
from benchmark.common.table import Table
from benchmark.quality.front.ladders import family_of
from benchmark.quality.front.report import experts_for
from benchmark.quality.report import format_loss

NOTE = """\
Experts: active ones a layer and step. Loss: cross-entropy above vanilla's on the same tokens of a text that was not
tuned on, in thousandths of a nat a token, ± the standard error of the paired differences; its rise in percent of
vanilla's. Published: the fewest experts with which a published setting, one for all layers, has the tuned plan's own
loss there, on the line between two settings of one policy. Saved: how many fewer the tuned plan wakes."""
Points = Mapping[str, Mapping[str, Any]]


def tabulate_tuning(points: Points) -> Table:
    """A row a batch size and tolerance."""
    headings = ["tolerance", "batch", "experts, vanilla's", "tuned", "kept mass", "loss", "rise", "published", "saved"]
    rows = []
    for point in points.values():
        start = [f"{point['tolerance']:g}%", str(point["batch"]), f"{point['before']:.1f}"]
        if "plan" not in point:
            rows.append([*start, "nothing found", "", "", "", "", ""])
            continue
        needed = find_published(point)
        rows.append(
            [
                *start,
                f"{point['experts']:.1f}",
                f"{point['kept_mass']:.3f}",
                format_loss(point["loss"]),
                f"{point['loss']['delta'] / point['cross_entropy']:+.2%}",
                f"{needed[0]:.1f} {needed[1]}" if needed else "",
                f"{1 - point['experts'] / needed[0]:.0%}" if needed else "",
            ]
        )
    return Table("Tuned on one text, measured on another", headings, rows, NOTE)


def find_published(point: Mapping[str, Any]) -> tuple[float, str] | None:
    """(experts, policy) of the published setting that needs fewest for the tuned plan's loss; None beyond all."""
    families: dict[str, list[tuple[float, float]]] = {}
    for one in point["published"]:
        families.setdefault(family_of(one["policy"]), []).append((one["experts"], one["loss"]["delta"]))
    found = [(experts_for(point["loss"]["delta"], sorted(curve)), name) for name, curve in families.items()]
    return min(((count, name) for count, name in found if count is not None), default=None)


def plot_tuning(path: Path, points: Points, title: str) -> None:
    """Loss over active experts, a panel a batch size: the published settings by policy, and the tuned plans."""
    batches = list(dict.fromkeys(point["batch"] for point in points.values()))
    figure, (axes,) = make_figure(title, 1, len(batches), share_y=True)
    for axis, batch in zip(axes, batches, strict=True):
        same = [point for point in points.values() if point["batch"] == batch]
        settings = same[0]["published"]
        for family in dict.fromkeys(family_of(one["policy"]) for one in settings):
            _draw(axis, [one for one in settings if family_of(one["policy"]) == family], "o:", family)
        _draw(axis, [point for point in same if "plan" in point], "D-", "tuned")
        axis.set_title(f"{batch} rows", fontsize=9)
        axis.set_xlabel("active experts a layer and step")
        axis.set_yscale("symlog", linthresh=1)
    axes[0].set_ylabel("cross-entropy above vanilla's, millinats a token")
    save_figure(figure, path)


def _draw(axis: Any, found: Sequence[Mapping[str, Any]], style: str, label: str) -> None:
    found = sorted(found, key=lambda one: one["experts"])
    deltas, errors = ([one["loss"][key] * 1000 for one in found] for key in ("delta", "error"))
    axis.errorbar([one["experts"] for one in found], deltas, yerr=errors, fmt=style, capsize=2, label=label)
