"""The table and the plot of a record of simulated dispatch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.common.plot import make_figure, save_figure
from benchmark.common.table import Table

NOTE = (
    "Mean active experts a layer and step of a replica; in brackets the load imbalance, largest over mean running "
    "requests of a step, mean over time; then the change to round robin. Held-out text of four domains, 16 requests a "
    "replica, of 24 - 72 steps each; every figure is the mean of runs with other seeds. Bound: the most requests of a "
    "replica over the mean."
)


def point_key(scenario: str, replicas: int) -> str:
    """The key of a case."""
    return f"{scenario} {replicas}"


def tabulate_affinity(points: Mapping[str, Any]) -> Table:
    """A row a case: active experts and imbalance of every rule."""
    rules = list(next(iter(points.values()))["rules"])
    rows = []
    for point in points.values():
        first = point["rules"][rules[0]]["active"]
        cells = [_cell(point["rules"][rule], None if rule == rules[0] else first) for rule in rules]
        rows.append([point["scenario"], str(point["replicas"]), *cells])
    return Table("Active experts by dispatch, simulated", ["traffic", "replicas", *rules], rows, NOTE)


def _cell(outcome: Mapping[str, float], first: float | None) -> str:
    change = "" if first is None else f", {outcome['active'] / first - 1:+.1%}"
    return f"{outcome['active']:.1f} ({outcome['imbalance']:.2f}){change}"


def plot_affinity(points: Mapping[str, Any], path: Path) -> None:
    """Active experts over replicas under mixed traffic, and the course of a run under every other."""
    mixed = [point for point in points.values() if point["scenario"] == "mixed"]
    others = [point for point in points.values() if point["scenario"] != "mixed"]
    count = 1 + len(others)
    figure, axes = make_figure("Active experts a layer and step, by dispatch", (count + 2) // 3, min(count, 3), True)
    panels = [axis for row in axes for axis in row]
    for number, rule in enumerate(next(iter(points.values()))["rules"]):
        style = {"marker": "o", "color": f"C{number}", "label": rule}
        panels[0].plot(
            [str(point["replicas"]) for point in mixed], [point["rules"][rule]["active"] for point in mixed], **style
        )
        for axis, point in zip(panels[1:], others, strict=False):
            course = point["rules"][rule]["course"]
            axis.plot([10 * tenth + 5 for tenth in range(len(course))], course, **style)
    panels[0].set(title="mixed domains", xlabel="replicas", ylabel="active experts")
    for axis, point in zip(panels[1:], others, strict=False):
        axis.set(title=f"{point['scenario']}, {point['replicas']} replicas", xlabel="% of the requests sent")
    for axis in panels[count:]:
        axis.set_visible(False)
    save_figure(figure, path)
