"""Records of the front on paper: the tables."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmark.common.table import Table
from benchmark.quality.front.ladders import CHANGES, OWN_SHARE, PUBLISHED, SQUARED, SWEEP
from benchmark.quality.model import Layout
from benchmark.quality.report import format_loss

NOTE = """\
Loss: cross-entropy above vanilla's on the same tokens, in nats a token, ± the standard error of the
paired differences, in batches of mixed domains. Experts: active ones a layer and step, as published and with the last
change that the policy has. Gain: that change's loss less the published setting's, paired in the same way. Experts
saved: how many fewer the changed policy needs for the published setting's loss, on the line between two of its own
settings; empty beyond them."""
GAINS_NOTE = """\
How much more or less is lost than as published, with the same budget, mean of a policy's settings that lose anything
measurable, ± the mean of their standard errors, each of paired differences; then how many of them lose less by
more than two errors, or more; and by how much more or fewer experts are active, where that is 2 % and more: a budget is
kept, but utility over all experts spends it on some that no row uses, most of all in a router with groups. A dash where
none loses anything measurable. Squared is measured with own_share 0.75."""
MODELS = ("softmax, 8 of 64", "sigmoid, groups, 8 of 64", "softmax, wide, 4 of 32")
"""Of the three records: the shipped checkpoint, `grouped` and `wide`."""
Points = Mapping[str, Mapping[str, Any]]


def tabulate_gains(*records: Points) -> Table:
    """A row a layout and ladder: of each model what `own_share` changes, and what it does with squared utilities."""
    asked = [(layout_of(point), point["ladder"]) for points in records for point in points.values()]
    order = sorted(dict.fromkeys(asked), key=lambda one: (one[0].tokens_per_request, one[0].batch))
    rows = []
    for layout, ladder in order:
        cells = []
        for points in records:
            members = [one for one in points.values() if (layout_of(one), one["ladder"]) == (layout, ladder)]
            cells += [_gain(members, change) for change in (OWN_SHARE, SQUARED)]
        rows.append([str(layout), ladder, *cells])
    headings = [f"{model}: {change}" for model in MODELS for change in ("own_share", "and squared")]
    return Table("Change of the loss", ["a step", "policy", *headings], rows, GAINS_NOTE, text_columns=2)


def _gain(members: Sequence[Mapping[str, Any]], change: str) -> str:
    having = [one["changes"] for one in members if change in one["changes"]]
    gains, experts = [], []
    for changes in having:
        published, over = changes[PUBLISHED]["loss"], changes[change]["over_published"]
        if published["delta"] > 2 * published["error"]:
            gains.append((over["delta"] / published["delta"], over["error"] / published["delta"]))
            experts.append(changes[change]["active_experts"] / changes[PUBLISHED]["active_experts"] - 1)
    if not gains:
        return "-" if having else ""
    more, less = (sum(sign * gain > 2 * error for gain, error in gains) for sign in (1, -1))
    mean, spread = (fmean(column) for column in zip(*gains, strict=True))
    told = f"{mean:+.0%} ± {spread:.0%}, {less} of {len(gains)} less"
    told += f", {more} more" if more else ""
    return f"{told}, {fmean(experts):+.0%} experts" if abs(fmean(experts)) >= 0.02 else told


def tabulate_front(points: Points) -> Table:
    """A row a layout and published setting."""
    headings = ["a step", "policy", "experts, vanilla's", "experts", *CHANGES, "gain", "experts saved"]
    rows = []
    for point in sorted(points.values(), key=lambda one: (one["tokens_per_request"], one["batch"])):
        changes, best = point["changes"], last_change(point)
        needed = experts_for(changes[PUBLISHED]["loss"]["delta"], curve(points, point, best))
        active = changes[PUBLISHED]["active_experts"]
        rows.append(
            [
                str(layout_of(point)),
                point["setting"],
                f"{point['vanilla_active']:.1f}",
                f"{active:.1f} -> {changes[best]['active_experts']:.1f}",
                *(format_loss(changes[name]["loss"]) if name in changes else "" for name in CHANGES),
                format_loss(changes[best]["over_published"]),
                "" if needed is None else f"{1 - needed / active:.0%}",
            ]
        )
    return Table("Loss as published and changed, nats", headings, rows, NOTE, text_columns=2)


def tabulate_own_share(*records: Points, models: Sequence[str] = MODELS) -> Table:
    """A row a model and setting that was measured at several values of `own_share`; `models` name the records."""
    names = sorted((OWN_SHARE, *SWEEP), key=lambda name: float(name.split()[-1]))
    rows = [
        [model, point["setting"], *(format_loss(point["changes"][name]["loss"]) for name in (PUBLISHED, *names))]
        for model, points in zip(models, records, strict=True)
        for point in points.values()
        if set(SWEEP) <= set(point["changes"])
    ]
    headings = ["model", "policy", "own_share 0", *names]
    return Table("Loss by own_share in batches of 16, nats", headings, rows, text_columns=2)


def layout_of(point: Mapping[str, Any]) -> Layout:
    """How its steps were made."""
    return Layout(point["batch"], point["tokens_per_request"])


def last_change(point: Mapping[str, Any]) -> str:
    """The change of a point that has most in it."""
    return SQUARED if SQUARED in point["changes"] else OWN_SHARE


def curve(points: Points, like: Mapping[str, Any], change: str) -> list[tuple[float, float]]:
    """(active experts, loss) of the settings of one ladder and layout, so changed, fewest experts first."""
    own = (layout_of(like), like["ladder"])
    found = [one["changes"].get(change) for one in points.values() if (layout_of(one), one["ladder"]) == own]
    return sorted((one["active_experts"], one["loss"]["delta"]) for one in found if one is not None)


def experts_for(loss: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """The experts at which the line through a curve has this loss; None where it has not."""
    for (few, high), (many, low) in pairwise(curve):
        if high >= loss >= low and high > low:
            return few + (high - loss) / (high - low) * (many - few)
    return None
