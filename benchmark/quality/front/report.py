"""A record of the front on paper: the tables and the plot."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmark.common.plot import make_figure, save_figure
from benchmark.common.table import Table
from benchmark.quality.front.ladders import CHANGES, OWN_SHARE, PUBLISHED, SQUARED, SWEEP, family_of
from benchmark.quality.report import format_loss

NOTE = """\
Loss: cross-entropy above vanilla's on the same tokens, in thousandths of a nat a token, ± the standard error of the
paired differences, in batches of mixed domains. Gain: the loss of the last change that the policy has, less that of the
published setting, paired in the same way. Experts saved: how many fewer the changed policy needs for the published
setting's loss, on the line between two of its own settings; empty beyond them."""
Points = Mapping[str, Mapping[str, Any]]


def tabulate_front(points: Points) -> Table:
    """A row a batch size and published setting."""
    headings = ["batch", "policy", "experts, vanilla's", "experts", *CHANGES, "gain", "experts saved"]
    rows = []
    for point in sorted(points.values(), key=lambda one: one["batch"]):
        changes, best = point["changes"], last_change(point)
        needed = experts_for(changes[PUBLISHED]["loss"]["delta"], curve(points, point, best))
        active = changes[PUBLISHED]["active_experts"]
        rows.append(
            [
                str(point["batch"]),
                point["setting"],
                f"{point['vanilla_active']:.1f}",
                f"{active:.1f}",
                *(format_loss(changes[name]["loss"]) if name in changes else "" for name in CHANGES),
                format_loss(changes[best]["over_published"]),
                "" if needed is None else f"{1 - needed / active:.0%}",
            ]
        )
    return Table("Loss as published and changed, mnats", headings, rows, NOTE, text_columns=2)


def tabulate_own_share(points: Points) -> Table:
    """A row a setting that was measured at several values of `own_share`."""
    swept = [point for point in points.values() if set(SWEEP) <= set(point["changes"])]
    names = sorted((OWN_SHARE, *SWEEP), key=lambda name: float(name.split()[-1]))
    rows = [
        [
            f"{point['batch']}",
            point["setting"],
            *(format_loss(point["changes"][name]["loss"]) for name in (PUBLISHED, *names)),
        ]
        for point in swept
    ]
    headings = ["batch", "policy", "own_share 0", *names]
    return Table("Loss by own_share, mnats", headings, rows, text_columns=2)


def last_change(point: Mapping[str, Any]) -> str:
    """The change of a point that has most in it."""
    return SQUARED if SQUARED in point["changes"] else OWN_SHARE


def curve(points: Points, like: Mapping[str, Any], change: str) -> list[tuple[float, float]]:
    """(active experts, loss) of the settings of one policy and batch size, so changed, fewest experts first."""
    family = family_of(like["setting"])
    same = [one for one in points.values() if one["batch"] == like["batch"] and family_of(one["setting"]) == family]
    found = [one["changes"][change] for one in same if change in one["changes"]]
    return sorted((one["active_experts"], one["loss"]["delta"]) for one in found)


def experts_for(loss: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """The experts at which the line through a curve has this loss; None where it has not."""
    for (few, high), (many, low) in pairwise(curve):
        if high >= loss >= low and high > low:
            return few + (high - loss) / (high - low) * (many - few)
    return None


def plot_front(path: Path, points: Points, title: str) -> None:
    """Loss over active experts: a panel a batch size, a color a policy, a line a change."""
    batches = sorted({point["batch"] for point in points.values()})
    families = list(dict.fromkeys(family_of(point["setting"]) for point in points.values()))
    styles = dict(zip(CHANGES, ("o:", "s--", "D-"), strict=True))
    figure, (axes,) = make_figure(title, 1, len(batches), share_y=True)
    for axis, batch in zip(axes, batches, strict=True):
        for color, family in enumerate(families):
            members = [
                point for point in points.values() if point["batch"] == batch and family_of(point["setting"]) == family
            ]
            for change, style in styles.items():
                found = [one["changes"][change] for one in members if change in one["changes"]]
                found.sort(key=lambda one: one["active_experts"])
                if not found:
                    continue
                experts = [one["active_experts"] for one in found]
                deltas, errors = ([one["loss"][key] * 1000 for one in found] for key in ("delta", "error"))
                label = f"{family}, {change}"
                axis.errorbar(experts, deltas, yerr=errors, fmt=style, color=f"C{color}", capsize=2, label=label)
        axis.set_title(f"batch {batch}", fontsize=9)
        axis.set_xlabel("active experts a layer and step")
        axis.set_yscale("symlog", linthresh=1)  # linear below one millinat, where the noise is
    axes[0].set_ylabel("cross-entropy above vanilla's, millinats a token")
    save_figure(figure, path)
