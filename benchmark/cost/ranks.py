"""Measure an MoE layer on several ranks, with whole experts and with slices: `python -m benchmark.cost.ranks`.

Each rank is a process on its own core. The benchmark varies the number of rows, the number of active experts and the
placement of the active experts. The table of choices in docs/many-devices.md shows a ratio of two times: the time with
slices divided by the time with whole experts.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from benchmark.common.command import Parser, run_main
from benchmark.common.paths import BUILD
from benchmark.common.table import Table
from benchmark.expert_sharding.ranks import COUNTS, Encoder, Router, activate, sweep

LAYERS = 2
SPREAD, FIRST = "spread", "on the first ranks"
"""The placements of the active experts."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = Parser("benchmark.cost.ranks", __doc__)
    parser.add_numbers("batch", (16, 64), "requests of a step")
    parser.add_numbers("active", (16, 32, 64, 128), "active experts")
    parser.add_count("experts", 128, "experts of a layer")
    parser.add_counts(COUNTS, "ranks", "rounds", "hidden", "width", "top_k", rounds=7, top_k=4)
    parser.add_record(BUILD / "cost")
    args = parser.parse_args(argv)
    cases: dict[str, tuple[Encoder, dict[str, Any]]] = {}
    for rows, active, where in product(args.batch, args.active, (SPREAD, FIRST)):
        if not args.top_k <= active <= args.experts:
            parser.error(f"--active must be between --top-k {args.top_k} and --experts {args.experts} (got {active})")
        if where == SPREAD or active < args.experts:
            # With this period, all rounds have the same routing, so the fastest round can be used.
            router = Router(activate(args.experts, active, where == SPREAD), args.top_k, args.ranks * LAYERS)
            encoder = Encoder(router, rows, 1, LAYERS, args.hidden, args.width)
            cases[f"{args.ranks} ranks, {rows} rows, {active} experts, {where}"] = encoder, {}
    record = parser.open_record("ranks", args, argv)
    sweep(record, cases, args.ranks, args.rounds)
    tabulate_ranks(record.points).show(record.path)


def read_seconds(point: Mapping[str, Any]) -> dict[str, float]:
    """Return the time of a layer in seconds for each layout.

    This is the time of the fastest round, because other programs can slow down the other rounds.
    """
    if "seconds" in point:  # only in records from before 2026-11-28
        return dict(point["seconds"])
    return {name: min(layout["layer_ms"]) / 1e3 for name, layout in point["layouts"].items()}


def tabulate_ranks(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each point. It shows the time of a layer with each layout."""
    rows = {key: read_seconds(point) for key, point in points.items()}
    layouts = list(next(iter(rows.values())))
    cells = [[key, *(f"{seconds[name] * 1e3:.2f}" for name in layouts)] for key, seconds in rows.items()]
    return Table("An MoE layer on ranks, ms", ["", *layouts], cells)


if __name__ == "__main__":
    run_main("cost.ranks", main)
