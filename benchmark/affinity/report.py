"""Tables and a picture of expert-affinity dispatch."""

from collections.abc import Mapping
from typing import Any

from benchmark.common.plot import Line, Panel, Picture
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE
from benchmark.quality.measure import compare_nats
from sglang_xshare.affinity.decision import DEFAULT

NOTE = """\
Mean active experts a layer and step of a replica. In brackets the load imbalance: the largest over the mean number of
running requests in a step, mean over time. Then the change relative to round robin. Held-out text of four domains; 16
requests a replica, of 24 - 72 steps each; every figure is the mean of runs with different seeds. Bound: the most
requests of a replica over the mean."""
LABEL, DRAWN = "active experts a layer and step", ("shift", "flood")
OBSERVE = "observe"
"""The policy that uses the model's own routing. The answers under this policy are compared."""
LIVE_NOTE = """\
{replicas} replicas of the trained checkpoint in fp32 run {per_replica} requests each at a time, with answers of
{shortest} - {longest} tokens. Active experts and rows: means of a layer and step while the load was steady. Change:
relative to the first row of the same traffic and policy. A token: active experts over decoded rows, which does not
favour a replica that steps fast with few rows. Imbalance: the largest over the mean number of running requests, mean
over time. Same: greedy answers under the model's own routing that equal the first row's token for token. Loss: under a
policy, with the text forced, cross-entropy above vanilla's on the same tokens, in nats a token, ± the standard error of
the paired differences."""


def name_rule(bound: float = DEFAULT) -> str:
    """Return the name of the affinity rule with this bound."""
    return f"bound {bound:g}"


def point_key(scenario: str, replicas: int) -> str:
    """Return the key of a case in the record."""
    return f"{scenario} {replicas}"


def tabulate_affinity(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each case. It shows the active experts and the imbalance of every rule."""
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


def plot_affinity(points: Mapping[str, Any]) -> Picture:
    """Return a picture of active experts.

    One panel shows them against the number of replicas, under mixed traffic. Each scenario of `DRAWN` has a panel that
    shows them over the course of a run.
    """
    rules = list(next(iter(points.values()))["rules"])
    mixed = [point for point in points.values() if point["scenario"] == "mixed"]
    replicas = [point["replicas"] for point in mixed]
    lines = [Line(rule, replicas, [point["rules"][rule]["active"] for point in mixed]) for rule in rules]
    panels = [Panel("replicas", LABEL, lines, "mixed domains", log_x=True)]
    for point in [point for point in points.values() if point["scenario"] in DRAWN]:
        courses = {rule: point["rules"][rule]["course"] for rule in rules}
        lines = [Line(rule, [10 * tenth + 5 for tenth in range(len(y))], y) for rule, y in courses.items()]
        panels.append(
            Panel("% of the requests sent", LABEL, lines, f"{point['scenario']}, {point['replicas']} replicas")
        )
    return Picture(tuple(panels))


def tabulate_live(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each traffic, policy and load balance method."""
    first: dict[tuple[str, str], Any] = {}
    rows = []
    for point in sorted(points.values(), key=lambda point: (point["policy"] != OBSERVE, point["policy"] != BASELINE)):
        base = first.setdefault((point["traffic"], point["policy"]), point)
        reference = points.get(f"{point['traffic']}, {BASELINE}, {base['method']}")
        rows.append(
            [
                point["traffic"],
                point["policy"],
                point["method"],
                f"{point['active']:.1f}",
                f"{point['active'] / base['active'] - 1:+.1%}",
                f"{_per_token(point):.2f} ({_per_token(point) / _per_token(base) - 1:+.1%})",
                f"{point['rows']:.1f}",
                f"{point['imbalance']:.2f}",
                *_compare_answers(point, base, reference),
            ]
        )
    headings = ["traffic", "policy", "load balance method", "active experts", "change", "a token", "rows a step"]
    shape = dict(next(iter(points.values()))["shape"])
    life = shape.pop("life")
    note = LIVE_NOTE.format(**shape, shortest=life // 2, longest=life * 3 // 2)
    headings += ["imbalance", "same", "loss, nats"]
    return Table("Active experts by dispatch, served", headings, rows, note, text_columns=3)


def _per_token(point: Mapping[str, float]) -> float:
    """Return the number of active experts per decoded row."""
    return point["active"] / point["rows"]


def _compare_answers(
    point: Mapping[str, Any], base: Mapping[str, Any], reference: Mapping[str, Any] | None
) -> list[str]:
    """Return two table cells: the number of answers that are equal to the base's answers, and the loss.

    The loss of forced answers is shown as the difference from the reference.
    """
    if point["nats"]:
        if reference is None:
            return ["-", "-"]
        loss = compare_nats(point, reference)
        return ["-", "+0.0000" if point is reference else str(loss)]
    answers = list(zip(point["outputs"].split(), base["outputs"].split(), strict=True))
    return [f"{sum(one == other for one, other in answers)} / {len(answers)}", "-"]
