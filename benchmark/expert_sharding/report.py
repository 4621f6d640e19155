"""The table of a record of expert sharding."""

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from benchmark.common.table import Table

NOTE = """\
An encoder of {layers} layers on {ranks} ranks, one core each: attention of a rank's own sequences of {sequence} rows,
and MoE layers, {hidden} x {width}, top-{top_k}, in fp32, with MoEShard's skewed router: a tenth of the experts, the
first, are drawn with alpha more than 1 / experts. shard: a slice of every expert a rank; ep: whole experts, the same
collectives; ep, all-to-all: rows go to their experts' ranks, as in the paper, but none is dropped. First token: a pass
of the encoder; layer: an MoE layer with its collectives; both of the slowest rank, medians of {rounds} rounds in which
the layouts take turns. Speed-up: time to first token over shard's. Balance: largest over mean rank, in rows times
columns of an expert | in CPU time of the products."""


def tabulate_sharding(points: Mapping[str, Any]) -> Table:
    """Return a row for each point, the layouts side by side."""
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
    """Return the largest over the mean."""
    return max(by_rank) / mean(by_rank)
