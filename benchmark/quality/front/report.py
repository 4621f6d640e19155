"""The tables and the picture of the front."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmark.common.plot import Picture, draw
from benchmark.common.table import Table
from benchmark.quality.equal_loss import experts_for, find_interval, format_share
from benchmark.quality.front.ladders import CHANGES, OWN_SHARE, PUBLISHED, SQUARED, SWEEP
from benchmark.quality.measure import explain_errors, find_bound, find_margin, format_loss
from benchmark.quality.model import Layout
from benchmark.quality.report import make_loss_line, make_loss_panel

NOTE = """\
Loss: cross-entropy above vanilla's on the same tokens, in nats a token, in batches of mixed domains. Experts: active
ones a layer and step, as published and with the last change that the policy has. Gain: that change's loss less the
published setting's, paired in the same way. Experts saved: how many fewer the changed policy needs for the published
setting's loss, on the line between two of its own settings [95 % interval over draws of the batches, from 5 batches
up]; empty beyond them. {errors}"""
GAINS_NOTE = """\
Change of the loss against the published setting with the same budget: the mean of a policy's settings that lose
anything measurable, ± the mean of their errors; then the number of settings that lose measurably less, or more; then
the change of active experts, if that is 2 % or more: a budget is kept, but utility over all experts spends it on some
that no row uses, most of all in a router with groups. A dash: no setting loses anything measurable, which is two
standard errors, or the interval over batches. Squared is measured with own_share 0.75."""
MODELS = ("softmax, 8 of 64", "sigmoid, groups, 8 of 64", "softmax, wide, 4 of 32")
"""The models of the three records: the shipped checkpoint, `grouped` and `wide`."""
Points = Mapping[str, Mapping[str, Any]]


def tabulate_gains(*records: Points) -> Table:
    """Return a row a layout and ladder: for each model the change by `own_share`, and with squared utilities too."""
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


def tabulate_front(points: Points) -> Table:
    """Return a row a layout and published setting."""
    headings = ["a step", "policy", "experts, vanilla's", "experts", *CHANGES, "gain", "experts saved"]
    rows = []
    for point in sorted(points.values(), key=lambda one: (one["tokens_per_request"], one["batch"])):
        changes, best = point["changes"], last_change(point)
        active = changes[PUBLISHED]["active_experts"]
        rows.append(
            [
                str(layout_of(point)),
                point["setting"],
                f"{point['vanilla_active']:.1f}",
                f"{active:.1f} -> {changes[best]['active_experts']:.1f}",
                *(format_loss(changes[name]["loss"]) if name in changes else "" for name in CHANGES),
                format_loss(changes[best]["over_published"]),
                _format_saved(changes[PUBLISHED], list_curve(points, point, best)),
            ]
        )
    errors = explain_errors(change["loss"] for point in points.values() for change in point["changes"].values())
    note = NOTE.format(errors=errors)
    return Table("Loss as published and changed, nats", headings, rows, note, text_columns=2)


def _format_saved(published: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> str:
    """Return how many fewer experts a curve of changed settings needs for the published loss."""
    experts = [one["active_experts"] for one in settings]

    def save(losses: Sequence[float]) -> float | None:
        needed = experts_for(losses[0], list(zip(experts, losses[1:], strict=True)))
        return None if needed is None else needed / published["active_experts"] - 1

    saved = save([one["loss"]["delta"] for one in (published, *settings)])
    if saved is None:
        return ""
    drawn = [one["losses"] for one in (published, *settings) if "losses" in one]  # none before 2026-11-28
    return format_share(saved, find_interval(drawn, save) if drawn else None)


def tabulate_own_share(*records: Points, models: Sequence[str] = MODELS) -> Table:
    """Return a row a model and setting that has several values of `own_share`; `models` name the records."""
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
    """Return the layout of a point's steps."""
    return Layout(point["batch"], point["tokens_per_request"])


def last_change(point: Mapping[str, Any]) -> str:
    """Return the change of a point with the most keys."""
    return SQUARED if SQUARED in point["changes"] else OWN_SHARE


def list_curve(points: Points, like: Mapping[str, Any], change: str) -> list[Mapping[str, Any]]:
    """Return the settings of one ladder and layout, so changed, fewest experts first."""
    own = (layout_of(like), like["ladder"])
    found = [one["changes"].get(change) for one in points.values() if (layout_of(one), one["ladder"]) == own]
    return sorted((one for one in found if one is not None), key=lambda one: one["active_experts"])


def plot_front(points: Points, record: Path) -> None:
    """Draw loss against active experts of the first layout, a line a policy, as published and with the last change."""
    first = layout_of(next(iter(points.values())))
    lines = []
    for ladder in dict.fromkeys(one["ladder"] for one in points.values() if layout_of(one) == first):
        like = next(one for one in points.values() if (layout_of(one), one["ladder"]) == (first, ladder))
        for change in (PUBLISHED, last_change(like)):
            lines.append(make_loss_line(f"{ladder}, {change}", list_curve(points, like, change)))
    draw(Picture((make_loss_panel(lines, str(first)),)), record.with_suffix(".png"))
