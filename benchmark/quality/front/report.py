"""Tables and a picture of the results of `benchmark.quality.front`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmark.common.plot import Picture, draw
from benchmark.common.table import Table
from benchmark.quality.front.ladders import OWN_SHARE, PUBLISHED, SQUARED, SWEEP
from benchmark.quality.measure import find_bound, find_margin, format_loss
from benchmark.quality.model import Layout
from benchmark.quality.report import make_loss_line, make_loss_panel

NOTE = """\
Change of the loss against the published setting with the same budget: the mean of a policy's settings that lose
anything measurable, ± the mean of their errors. Then the number of settings that lose measurably less, or more. Then
the change of active experts, if 2 % or more: the budget is equal, but utility over all experts spends a part of it on
experts that no row uses, most of all in a router with groups. A dash: no setting loses anything measurable, that is,
more than two standard errors or the interval over batches. Squared is measured with own_share 0.75."""
MODELS = ("softmax, 8 of 64", "sigmoid, groups, 8 of 64", "softmax, wide, 4 of 32")
"""Descriptions of the models in the three records: the shipped checkpoint, `grouped` and `wide`."""
Points = Mapping[str, Mapping[str, Any]]


def tabulate_gains(*records: Points, models: Sequence[str] = MODELS) -> Table:
    """Return a table with one row for each layout and ladder.

    For each model, a row contains the change of the loss with `own_share`, and then also with squared utilities.
    `models` contains the name of each record's model.
    """
    asked = [(layout_of(point), point["ladder"]) for points in records for point in points.values()]
    order = sorted(dict.fromkeys(asked), key=lambda one: (one[0].tokens_per_request, one[0].batch))
    rows = []
    for layout, ladder in order:
        cells = []
        for points in records:
            members = [one for one in points.values() if (layout_of(one), one["ladder"]) == (layout, ladder)]
            cells += [_gain(members, change) for change in (OWN_SHARE, SQUARED)]
        rows.append([str(layout), ladder, *cells])
    headings = [f"{model}: {change}" for model in models for change in ("own_share", "and squared")]
    return Table("Change of the loss", ["a step", "policy", *headings], rows, NOTE, text_columns=2)


def _gain(members: Sequence[Mapping[str, Any]], change: str) -> str:
    having = [one["changes"] for one in members if change in one["changes"]]
    gains, experts = [], []
    for changes in having:
        published, over = changes[PUBLISHED]["loss"], changes[change]["over_published"]
        if published["delta"] > find_bound(published):
            whole = published["delta"]
            gains.append((over["delta"] / whole, find_margin(over) / whole, find_bound(over) / whole))
            experts.append(changes[change]["active_experts"] / changes[PUBLISHED]["active_experts"] - 1)
    if not gains:
        return "-" if having else ""
    more, less = (sum(sign * gain > bound for gain, _, bound in gains) for sign in (1, -1))
    mean, margin, _ = (fmean(column) for column in zip(*gains, strict=True))
    text = f"{mean:+.0%} ± {margin:.0%}, {less} of {len(gains)} less"
    text += f", {more} more" if more else ""
    return f"{text}, {fmean(experts):+.0%} experts" if abs(fmean(experts)) >= 0.02 else text


def tabulate_own_share(*records: Points, models: Sequence[str] = MODELS) -> Table:
    """Return a table of settings that were measured with several values of `own_share`.

    `models` contains the name of each record's model.
    """
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
    """Return the layout of the point's steps."""
    return Layout(point["batch"], point["tokens_per_request"])


def last_change(point: Mapping[str, Any]) -> str:
    """Return the name of the point's last change: squared utilities, or `own_share` alone if they are missing."""
    return SQUARED if SQUARED in point["changes"] else OWN_SHARE


def list_curve(points: Points, like: Mapping[str, Any], change: str) -> list[Mapping[str, Any]]:
    """Return the results of one change, sorted by active experts.

    The result covers all settings that have the same ladder and layout as the point `like`.
    """
    own = (layout_of(like), like["ladder"])
    found = [one["changes"].get(change) for one in points.values() if (layout_of(one), one["ladder"]) == own]
    return sorted((one for one in found if one is not None), key=lambda one: one["active_experts"])


def plot_front(points: Points, record: Path) -> None:
    """Draw loss against active experts for the first layout.

    Each ladder has two lines: one with the published settings and one with the last change.
    """
    first = layout_of(next(iter(points.values())))
    lines = []
    for ladder in dict.fromkeys(one["ladder"] for one in points.values() if layout_of(one) == first):
        like = next(one for one in points.values() if (layout_of(one), one["ladder"]) == (first, ladder))
        for change in (PUBLISHED, last_change(like)):
            lines.append(make_loss_line(f"{ladder}, {change}", list_curve(points, like, change)))
    draw(Picture((make_loss_panel(lines, str(first)),)), record.with_suffix(".png"))
