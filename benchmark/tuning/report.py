"""How many experts a tuned plan saves: against published settings that lose as much, with an error; and the table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np

from benchmark.common.table import Table
from benchmark.quality.front.report import experts_for
from benchmark.quality.report import format_loss
from sglang_xshare.tune.measure import Measurement, compare

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


DRAWS = 400
"""Resamplings of the text, from which the error is told."""
Point = Mapping[str, Any]


def describe(found: Measurement, vanilla: Measurement, before: float, layers: int) -> dict[str, Any]:
    """A policy's figures on a text: experts of a layer and step, vanilla's `before`, mass, `Loss`, divergence."""
    experts = before - (found.saved or 0.0) / layers
    loss = asdict(compare(found, vanilla))
    return {"experts": experts, "kept_mass": found.kept_mass, "loss": loss, "divergence": fmean(found.divergences)}


def find_published(
    point: Point, of: Callable[[Point], float] = lambda one: one["loss"]["delta"]
) -> tuple[float, str] | None:
    """(experts, ladder) of the published setting with fewest for the tuned loss (`of`), interpolated; None beyond."""
    ladders: dict[str, list[tuple[float, float]]] = {}
    for one in point["published"]:
        ladders.setdefault(ladder_of(one["policy"]), []).append((one["experts"], of(one)))
    found = [(experts_for(of(point), sorted(curve)), name) for name, curve in ladders.items()]
    return min(((count, name) for count, name in found if count is not None), default=None)


def ladder_of(setting: str) -> str:
    """The setting but for the value of its last key."""
    return setting.rpartition("=")[0]


def find_saved(point: Point, of: Callable[[Point], float] = lambda one: one["loss"]["delta"]) -> float | None:
    """The share of experts by which the tuned plan has fewer than the best published setting."""
    needed = find_published(point, of)
    return None if needed is None else 1 - point["experts"] / needed[0]


def estimate_error(point: Point, found: Measurement, published: Sequence[Measurement], vanilla: Measurement) -> float:
    """The standard error of `find_saved` over resamplings of the samples, without those beyond all settings."""
    losses = np.array([one.nats for one in (found, *published)]) - np.array(vanilla.nats)
    rows = np.random.default_rng(0).integers(losses.shape[1], size=(DRAWS, losses.shape[1]))
    shares = []
    for own, *others in losses[:, rows].mean(2).T.tolist():
        pairs = zip(point["published"], others, strict=True)
        drawn = {**point, "drawn": own, "published": [{**one, "drawn": loss} for one, loss in pairs]}
        shares.append(find_saved(drawn, lambda one: one["drawn"]))
    return float(np.std([share for share in shares if share is not None]))
