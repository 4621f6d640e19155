"""A table of the measurements of expert sharding."""

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from benchmark.common.table import Table

NOTE = """\
An encoder of {layers} layers on {ranks} ranks with one core each, in fp32: attention of a rank's own sequences of
{sequence} rows, and MoE layers of {hidden} x {width}, top-{top_k}, with MoEShard's skewed router: each of the first
tenth of the experts is drawn with odds of 1 / experts + alpha. shard: a slice of every expert on each rank; ep: whole
experts, with the same collectives; ep, all-to-all: rows go to the ranks of their experts, as in the paper, but no row
is dropped. First token: one pass of the encoder. Layer: one MoE layer with its collectives. Both are times of the
slowest rank, medians of {rounds} rounds in which the layouts take turns. Speed-up: time to first token divided by
shard's. Balance: largest divided by mean rank, in rows times columns of an expert | in CPU time of the products."""


def tabulate_sharding(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each point. Its columns compare the layouts."""
    first_point = next(iter(points.values()))
    names = list(first_point["layouts"])
    others = names[1:]
    headings = [
        "point",
        *(f"{name}: first token, ms" for name in names),
        *(f"speed-up over {name}" for name in others),
        *(f"{name}: layer, ms" for name in names),
        *(f"{name}: balance" for name in names[:2]),
    ]
    rows = []
    for key, point in points.items():
        layouts = point["layouts"]
        first, layer = ({name: median(layouts[name][kind]) for name in names} for kind in ("ttft_ms", "layer_ms"))
        balances = [[f"{balance(layouts[name][kind]):.3f}" for kind in ("work", "cpu_ms")] for name in names[:2]]
        times = [f"{first[name]:.0f}" for name in names] + [f"{first[name] / first[names[0]]:.2f}" for name in others]
        rows.append([key, *times, *(f"{layer[name]:.1f}" for name in names), *map(" | ".join, balances)])
    return Table("Expert sharding against expert parallelism", headings, rows, NOTE.format(**first_point["shape"]))


def balance(by_rank: Sequence[float]) -> float:
    """Return the largest value divided by the mean."""
    return max(by_rank) / mean(by_rank)
