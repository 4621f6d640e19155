"""A record of tuning on paper: the table."""

from collections.abc import Mapping
from typing import Any

from benchmark.common.table import Table
from benchmark.quality.report import format_loss
from benchmark.tuning.saving import find_published, find_saved

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
