"""A record of tuning on paper: the table and the plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.common.plot import make_figure, save_figure
from benchmark.common.table import Table
from benchmark.quality.report import format_loss
from benchmark.tuning.saving import find_published, find_saved, ladder_of

NOTE = """\
Experts: active ones a layer and step. Loss: cross-entropy above vanilla's on the same tokens of a text that was not
tuned on, in nats a token, ± the standard error of the paired differences; its rise in percent of
vanilla's. Published: the fewest experts with which a published setting, one for all layers, has the tuned plan's own
loss there, on the line between two settings of a ladder. Saved: how many fewer the tuned plan has, ± the standard
error over resamplings of the text. At equal divergence: the same with the mean Kullback-Leibler divergence from
vanilla's predictions in place of the loss, which varies less from text to text."""
Points = Mapping[str, Mapping[str, Any]]


def tabulate_tuning(points: Points) -> Table:
    """A row a batch size and tolerance."""
    headings = [
        *("tolerance", "batch", "experts, vanilla's", "tuned", "kept mass", "loss", "rise", "published", "saved"),
        "at equal divergence",
    ]
    rows = []
    for point in points.values():
        start = [f"{point['tolerance']:g}%", str(point["batch"]), f"{point['before']:.1f}"]
        if "plan" not in point:
            rows.append([*start, "nothing found", "", "", "", "", "", ""])
            continue
        needed, saved = find_published(point), find_saved(point)
        certain = find_saved(point, lambda one: one["divergence"])
        rows.append(
            [
                *start,
                f"{point['experts']:.1f}",
                f"{point['kept_mass']:.3f}",
                format_loss(point["loss"]),
                f"{point['loss']['delta'] / point['cross_entropy']:+.2%}",
                f"{needed[0]:.1f} {needed[1]}" if needed else "",
                "" if saved is None else f"{saved:.1%} ± {point['saved_error']:.1%}",
                "" if certain is None else f"{certain:.1%}",
            ]
        )
    return Table("Tuned on one text, measured on another", headings, rows, NOTE)


def plot_tuning(path: Path, points: Points, title: str) -> None:
    """Loss over active experts, a panel a batch size: the published ladders, and the tuned plans."""
    batches = list(dict.fromkeys(point["batch"] for point in points.values()))
    figure, (axes,) = make_figure(title, 1, len(batches), share_y=True)
    for axis, batch in zip(axes, batches, strict=True):
        same = [point for point in points.values() if point["batch"] == batch]
        settings = same[0]["published"]
        for ladder in dict.fromkeys(ladder_of(one["policy"]) for one in settings):
            _draw(axis, [one for one in settings if ladder_of(one["policy"]) == ladder], "o:", ladder)
        _draw(axis, [point for point in same if "plan" in point], "D-", "tuned")
        axis.set_title(f"{batch} rows", fontsize=9)
        axis.set_xlabel("active experts a layer and step")
        axis.set_yscale("symlog", linthresh=0.001)
    axes[0].set_ylabel("cross-entropy above vanilla's, nats a token")
    save_figure(figure, path)


def _draw(axis: Any, found: Sequence[Mapping[str, Any]], style: str, label: str) -> None:
    found = sorted(found, key=lambda one: one["experts"])
    deltas, errors = ([one["loss"][key] for one in found] for key in ("delta", "error"))
    axis.errorbar([one["experts"] for one in found], deltas, yerr=errors, fmt=style, capsize=2, label=label)
