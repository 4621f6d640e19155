"""A table and a picture that compare tuned policies with published settings of equal loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import numpy as np

from benchmark.common.plot import Picture
from benchmark.common.table import Table
from benchmark.quality.equal_loss import experts_for, find_interval, format_share
from benchmark.quality.measure import format_loss
from benchmark.quality.report import make_loss_line, make_loss_panel
from sglang_xshare.tune.measure import Measurement, compare

NOTE = """\
Experts: active experts a layer and step. Loss: cross-entropy above vanilla's on the same tokens of a text that was not
tuned on, in nats a token, ± the standard error of the paired differences; its rise in percent of vanilla's. Published:
the fewest experts at which a published setting, the same in all layers, has the tuned plan's loss, interpolated between
two settings of a ladder. Saved: the share of experts that the tuned plan has fewer, {saved}. At equal divergence: the
same with the mean Kullback-Leibler divergence from vanilla's predictions in place of the loss, which varies less from
text to text. The best published setting is chosen on the text that is judged, which favours the published settings."""
BY_BATCH = "[95 % interval over draws of the batches]"
BY_TEXT = "± the standard error over draws of the texts, as recorded"
Points = Mapping[str, Mapping[str, Any]]


def tabulate_tuning(points: Points) -> Table:
    """Return a table with one row for each batch size and tolerance."""
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
                "" if saved is None else _format_saved(saved, point),
                "" if certain is None else f"{certain:.1%}",
            ]
        )
    note = NOTE.format(saved=BY_TEXT if any("saved_error" in point for point in points.values()) else BY_BATCH)
    return Table("Tuned on one text, measured on another", headings, rows, note)


def _format_saved(saved: float, point: Mapping[str, Any]) -> str:
    if "saved_error" in point:  # only in records from before 2026-11-28
        return f"{saved:.1%} ± {point['saved_error']:.1%}"
    return format_share(saved, point.get("saved_interval"), 1)


Point = Mapping[str, Any]


def describe(found: Measurement, vanilla: Measurement, before: float, layers: int) -> dict[str, Any]:
    """Return the results of a policy: active experts per layer and step, kept mass, `Loss` and divergence."""
    experts = before - (found.saved or 0.0) / layers
    loss = asdict(compare(found, vanilla))
    return {"experts": experts, "kept_mass": found.kept_mass, "loss": loss, "divergence": fmean(found.divergences)}


def find_published(
    point: Point, of: Callable[[Point], float] = lambda one: one["loss"]["delta"]
) -> tuple[float, str] | None:
    """Find the published ladder with the fewest active experts at the loss of the tuned policy.

    Return its number of experts and its name, or None if the loss is outside all ladders. `of` returns the loss of a
    point.
    """
    ladders: dict[str, list[tuple[float, float]]] = {}
    for one in point["published"]:
        ladders.setdefault(ladder_of(one["policy"]), []).append((one["experts"], of(one)))
    found = [(experts_for(of(point), sorted(curve)), name) for name, curve in ladders.items()]
    return min(((count, name) for count, name in found if count is not None), default=None)


def ladder_of(setting: str) -> str:
    """Return the name of the setting's ladder: the setting without the value of its last key."""
    return setting.rpartition("=")[0]


def find_saved(point: Point, of: Callable[[Point], float] = lambda one: one["loss"]["delta"]) -> float | None:
    """Return the share of experts that the tuned policy saves, compared with the best published setting."""
    needed = find_published(point, of)
    return None if needed is None else 1 - point["experts"] / needed[0]


def estimate_interval(
    point: Point, found: Measurement, published: Sequence[Measurement], vanilla: Measurement
) -> tuple[float, float] | None:
    """Return a 95 % bootstrap interval of `find_saved`, or None for fewer than 5 batches."""
    losses = np.array([one.nats for one in (found, *published)]) - np.array(vanilla.nats)
    batches = losses.reshape(len(losses), -1, point["batch"]).mean(2).tolist()

    def save(means: Sequence[float]) -> float | None:
        pairs = zip(point["published"], means[1:], strict=True)
        drawn = {**point, "drawn": means[0], "published": [{**one, "drawn": loss} for one, loss in pairs]}
        return find_saved(drawn, lambda one: one["drawn"])

    return find_interval(batches, save)


def plot_tuning(points: Points) -> Picture:
    """Return a picture of loss against active experts for the published ladders and the tuned policies."""
    first = next(iter(points.values()))
    some = [point for point in points.values() if point["batch"] == first["batch"]]
    ladders: dict[str, list[Point]] = {"tuned": [point for point in some if "plan" in point]}
    for one in first["published"]:
        ladders.setdefault(ladder_of(one["policy"]), []).append(one)
    lines = [
        replace(
            make_loss_line(name, [{**one, "active_experts": one["experts"]} for one in found]), is_main=name == "tuned"
        )
        for name, found in ladders.items()
    ]
    note = "error bars: ± standard error of the loss over texts"
    return Picture((make_loss_panel(lines, f"{first['batch']} requests a step"),), note)
