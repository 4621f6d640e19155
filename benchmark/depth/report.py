"""Tables and a picture of draft depths."""

from collections.abc import Mapping
from typing import Any

from benchmark.common.comparison import Comparison, Summary
from benchmark.common.interval import Spread, format_rounds, format_spread, spread
from benchmark.common.plot import Line, Panel, Picture
from benchmark.common.table import Table

FIXED = 0, 1, 3, 5, 7
NO_DRAFTS, UPSTREAM, THROUGHPUT = "no drafts", "SGLang's choice", "as deep as pays"
REACHED = 0.97
"""The minimum relative throughput of a server that chooses its depth by tokens per second.

It is relative to the best fixed depth, and to a server without draft tokens.
"""
NOTE = (
    "Output tokens/s, means of {rounds} alternating rounds; servers of a policy are measured in the same minutes. "
    "{upstream}: --speculative-adaptive as published; {throughput}: by tokens per second; the others: fixed depths. "
    "Of the best: tokens/s of {throughput} divided by those of the best fixed depth in the same round, mean [95 % "
    "t-interval]; of no drafts and of {upstream}: likewise. By round: the ratios to the best fixed depth. Before each "
    "number of requests, the two servers that choose the depth ran several unmeasured batches (--settled, by default "
    "16), and the other servers ran one."
)

SUMMARY_NOTE = (
    "Tokens/s with drafts divided by tokens/s without, under the same policy: mean of {rounds} rounds' ratios [95 % "
    "interval]."
)


def key_of(policy: str, requests: int) -> str:
    """Return the key of a point in the record."""
    return f"{policy}, {requests} at a time"


def name_of(policy: str, depth: int | str) -> str:
    """Return the name of a server. It contains the policy, and the depth or the rule that chooses the depth."""
    return f"{policy}, {depth if isinstance(depth, str) else _name_fixed(depth)}"


def tabulate_depths(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each policy and number of requests.

    A row contains the throughput with each depth, and the chosen depth's throughput relative to the others.
    """
    rows, headings = [], []
    for point in points.values():
        policy, requests, found = _read(point)
        headings = ["policy", "requests", *found, "of the best", "of no drafts", f"of {UPSTREAM}", "by round"]
        best = find_best(found)
        shares = [format_spread(spread(pair(found, one)), 2) for one in (best, NO_DRAFTS, UPSTREAM)]
        shares.append(format_rounds(pair(found, best), 2))
        speeds = {name: f"{row.throughput.mean:.1f}" for name, row in found.items()}
        cells = [f"**{speed}**" if name == best else speed for name, speed in speeds.items()]
        rows.append([policy, str(requests), *cells, *shares])
    note = NOTE.format(rounds=_count_rounds(points), upstream=UPSTREAM, throughput=THROUGHPUT)
    return Table("Draft depths", headings, rows, note)


def find_best(found: Mapping[str, Summary]) -> str:
    """Return the name of the fastest fixed depth."""
    fixed = [name for name in found if name not in (UPSTREAM, THROUGHPUT)]
    return max(fixed, key=lambda name: found[name].throughput.mean)


def pair(found: Mapping[str, Summary], name: str) -> list[float]:
    """Return the ratio of two throughputs for each round: the chosen depth divided by the depth `name`."""
    return [own / other for own, other in zip(found[THROUGHPUT].ratios, found[name].ratios, strict=True)]


def find_missed(points: Mapping[str, Any]) -> list[str]:
    """Return one line for each point at which the chosen depth is too slow."""
    missed = []
    for key, point in points.items():
        _, _, found = _read(point)
        for other, least in ((find_best(found), REACHED), (NO_DRAFTS, REACHED), (UPSTREAM, 1.0)):
            share = spread(pair(found, other)).mean
            missed += [f"{key}: {share:.3f} of {other}, must be {least}"] if share < least else []
    return missed


def summarize_depths(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each policy and one column for each number of requests.

    A cell contains the throughput of the chosen depth divided by the throughput without draft tokens.
    """
    cells: dict[str, dict[str, str]] = {}
    for point in points.values():
        policy, requests, found = _read(point)
        cells.setdefault(policy, {})[str(requests)] = format_spread(spread(pair(found, NO_DRAFTS)), 2)
    sizes = list(dict.fromkeys(size for by_size in cells.values() for size in by_size))
    rows = [[policy, *(by_size.get(size, "-") for size in sizes)] for policy, by_size in cells.items()]
    headings = [f"{size} request{'' if size == '1' else 's'}" for size in sizes]
    note = SUMMARY_NOTE.format(rounds=_count_rounds(points))
    return Table("Depth by tokens per second", ["policy", *headings], rows, note)


def plot_depths(points: Mapping[str, Any]) -> Picture:
    """Return a picture of throughput against the number of requests.

    Each policy has one panel, and each depth has one line. The line of the chosen depth is drawn on top.
    """
    found: dict[str, dict[str, list[tuple[int, Spread]]]] = {}
    for point in points.values():
        policy, requests, rows = _read(point)
        for depth, row in rows.items():
            found.setdefault(policy, {}).setdefault(depth, []).append((requests, row.throughput))
    panels = []
    for policy, by_depth in found.items():
        lines = []
        for name, measured in by_depth.items():
            xs, speeds = zip(*sorted(measured, key=lambda one: one[0]), strict=True)
            ends = [(one.lower, one.upper) for one in speeds]
            lines.append(Line(name, xs, [one.mean for one in speeds], ends, name == THROUGHPUT))
        title = "no policy" if policy == "off" else policy
        panels.append(Panel("requests at a time", "output tokens/s", lines, title, log_x=True))
    return Picture(panels, "error bars: 95 % t-intervals over rounds")


def _read(point: Mapping[str, Any]) -> tuple[str, int, dict[str, Summary]]:
    """Return the policy of a point, the number of concurrent requests, and the results of each depth."""
    comparison = Comparison.read(point)
    by_depth = {row.name.rpartition(", ")[2]: row for row in comparison.summaries}
    return comparison.summaries[0].name.rpartition(", ")[0], comparison.workload.concurrency, by_depth


def _count_rounds(points: Mapping[str, Any]) -> str:
    return " or ".join(map(str, sorted({Comparison.read(point).rounds for point in points.values()})))


def _name_fixed(depth: int) -> str:
    return NO_DRAFTS if depth == 0 else f"{depth} draft{'s' if depth > 1 else ''}"
