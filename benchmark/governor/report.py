"""A record of the governor on paper: the table and the plot."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.common.plot import make_figure, save_figure
from benchmark.common.table import Table
from benchmark.quality.front.report import experts_for
from benchmark.quality.report import format_loss

NOTE = """\
Experts: active a layer and step, the mean over all steps. Loss: cross-entropy above vanilla's on the same tokens, in
thousandths of a nat a token, ± the standard error of the paired differences. Fixed need: the active experts at which
fixed budgets of the same policy have that loss, on the line between two of them, and at that loss plus and less its
error. Moves: of the budget, in all stretches together; the first ones come down from the highest budget."""
Points = Mapping[str, Mapping[str, Any]]


def tabulate_governor(points: Points) -> Table:
    """A row a governor or a fixed share of the mass, each beside the fixed budgets of the policy."""
    headings = ["policy", "experts", "kept mass", "loss, mnats", "fixed need", "experts saved", "moves"]
    rows = []
    for name, point in points.items():
        fixed = curve(points, point["family"].replace("mass=", "add="))
        if "floor" not in point and "mass=" not in name:
            continue
        active, loss = point["active_experts"], point["loss"]
        need = experts_for(loss["delta"], fixed)
        ends = [experts_for(loss["delta"] + sign * loss["error"], fixed) for sign in (1, -1)]
        spread = "" if need is None else f"{need:.1f}"
        if need is not None and None not in ends:
            spread += f" [{ends[0]:.1f}, {ends[1]:.1f}]"
        rows.append(
            [
                name,
                f"{active:.1f}",
                f"{point['kept_mass']:.3f}",
                format_loss(loss),
                spread,
                "" if need is None else f"{1 - active / need:.1%}",
                str(point.get("moves", "")),
            ]
        )
    return Table("A governor against fixed budgets", headings, rows, NOTE)


def curve(points: Points, family: str) -> list[tuple[float, float]]:
    """(active experts, loss) of a family's fixed settings, fewest experts first."""
    found = [one for one in points.values() if one["family"] == family and "fixed" in one]
    return sorted((one["active_experts"], one["loss"]["delta"]) for one in found)


def plot_governor(path: Path, points: Points, title: str) -> None:
    """Loss over active experts, a panel a policy; below each, what the governors' budgets did over the steps."""
    families = list(dict.fromkeys(one["family"] for one in points.values() if "floor" in one))
    figure, axes = make_figure(title, 2, len(families))
    for family, front, course in zip(families, axes[0], axes[1], strict=True):
        governed = [one for one in points.values() if one["family"] == family and "floor" in one]
        shares = curve(points, family.replace("add=", "mass="))
        lines = {
            "fixed budgets": curve(points, family),
            "governed": [(one["active_experts"], one["loss"]["delta"]) for one in governed],
        }
        if "add=" in family:
            lines["fixed shares of the mass"] = shares
        for (label, line), style in zip(lines.items(), ("o:", "D-", "s--"), strict=False):
            front.plot([x for x, _ in line], [y * 1000 for _, y in line], style, label=label)
        front.set_title(family.rstrip("="), fontsize=9)
        front.set_xlabel("active experts a layer and step")
        front.set_ylabel("cross-entropy above vanilla's, millinats a token")
        front.set_yscale("symlog", linthresh=1)  # linear below one millinat, where the noise is
        for number, one in enumerate(governed):
            budgets = [budget for stretch in one["budgets"] for budget in stretch]
            course.plot(budgets, color=f"C{number}", label=f"budget at floor {one['floor']}")
        ends = 0
        for stretch in governed[0]["budgets"]:
            ends += len(stretch)
            course.axvline(ends, color="0.8", linewidth=0.8)
        course.set_xlabel("step; lines part the stretches")
        course.set_ylabel("budget")
    save_figure(figure, path)
