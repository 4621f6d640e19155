"""The table and the picture of draft depths."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib import pyplot

from benchmark.common.comparison import Comparison, Summary
from benchmark.common.table import Table

matplotlib.use("Agg")
FIXED = 0, 1, 3, 5, 7
UPSTREAM, THROUGHPUT = "SGLang's choice", "as deep as pays"
REACHED = 0.97
"""The share of the best fixed depth, and of no drafts, that the depth by tokens per second has to reach."""
NOTE = (
    "Output tokens/s, medians of {rounds} alternating rounds; servers of a policy are measured in the same minutes. "
    "Fixed: that many drafts a request and step, 0 a server without a draft. {upstream}: --speculative-adaptive as "
    "published, {throughput}: by tokens per second. Of the best: medians within the rounds of its tokens/s to those of "
    "the best fixed depth, of no drafts, and of {upstream}."
)


def key_of(policy: str, requests: int) -> str:
    """Return the key of a point of the record."""
    return f"{policy}, {requests} at a time"


def name_of(policy: str, depth: int | str) -> str:
    """Return the name of a server: its policy, and its depth or how that is chosen."""
    return f"{policy}, {depth if isinstance(depth, str) else _name_fixed(depth)}"


def tabulate_depths(points: Mapping[str, Any]) -> Table:
    """Return a row a policy and number of requests: tokens/s by depth, and what the chosen depth reaches."""
    rows, headings, rounds = [], [], 0
    for point in points.values():
        comparison = Comparison.read(point)
        names = [_shorten(row) for row in comparison.summaries]
        headings = ["policy", "requests", *names, "of the best", "of no drafts", f"of {UPSTREAM}"]
        speeds = {name: row.throughput.median for name, row in zip(names, comparison.summaries, strict=True)}
        policy = comparison.summaries[0].name.rpartition(", ")[0]
        best = find_best(speeds)
        shares = (f"{compare(comparison, one):.2f}" for one in (best, names[0], UPSTREAM))
        cells = [f"**{speeds[name]:.1f}**" if name == best else f"{speeds[name]:.1f}" for name in names]
        rows.append([policy, str(comparison.workload.concurrency), *cells, *shares])
        rounds = comparison.rounds
    note = NOTE.format(rounds=rounds, upstream=UPSTREAM, throughput=THROUGHPUT)
    return Table("Draft depths", headings, rows, note)


def find_best(speeds: Mapping[str, float]) -> str:
    """Return the fastest fixed depth."""
    return max((name for name in speeds if name not in (UPSTREAM, THROUGHPUT)), key=speeds.__getitem__)


def compare(comparison: Comparison, name: str) -> float:
    """Return the median over rounds of the chosen depth's tokens/s to those of the server `name`."""
    results = {_shorten(row): one.results for row, one in zip(comparison.summaries, comparison.series, strict=True)}
    pairs = zip(results[THROUGHPUT], results[name], strict=True)
    return median(own["output_throughput"] / other["output_throughput"] for own, other in pairs)


def find_missed(points: Mapping[str, Any]) -> list[str]:
    """Return a line for each point at which the chosen depth does not reach what it has to."""
    missed = []
    for key, point in points.items():
        comparison = Comparison.read(point)
        names = [_shorten(row) for row in comparison.summaries]
        speeds = {name: row.throughput.median for name, row in zip(names, comparison.summaries, strict=True)}
        for other, least in ((find_best(speeds), REACHED), (names[0], REACHED), (UPSTREAM, 1.0)):
            share = compare(comparison, other)
            missed += [f"{key}: {share:.3f} of {other}, must be {least}"] if share < least else []
    return missed


def plot_depths(points: Mapping[str, Any], path: Path) -> None:
    """Draw tokens/s against requests, a panel a policy and a line a depth, the chosen one on top."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for point in points.values():
        comparison = Comparison.read(point)
        for row in comparison.summaries:
            lines = panels.setdefault(row.name.rpartition(", ")[0], {})
            lines.setdefault(_shorten(row), []).append((comparison.workload.concurrency, row.throughput.median))
    size = 5.0 * len(panels), 3.6
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for panel, (policy, lines) in zip(axes[0], panels.items(), strict=True):
        for name, line in lines.items():
            is_ours = name == THROUGHPUT
            style = {"linewidth": 2.4, "zorder": 3, "color": "black"} if is_ours else {"linewidth": 1.2}
            panel.plot(*zip(*sorted(line), strict=True), marker="o", markersize=3, label=name, **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted({x for line in lines.values() for x, _ in line}))
        panel.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        panel.set_title("no policy" if policy == "off" else policy)
        panel.set_xlabel("requests at a time")
    axes[0][0].set_ylabel("output tokens/s")
    axes[0][0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _name_fixed(depth: int) -> str:
    return "no drafts" if depth == 0 else f"{depth} draft{'s' if depth > 1 else ''}"


def _shorten(row: Summary) -> str:
    return row.name.rpartition(", ")[2]
