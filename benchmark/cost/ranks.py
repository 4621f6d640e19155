"""An MoE layer on ranks, whole experts beside slices: `python -m benchmark.cost.ranks`.

Times a layer on ranks that are processes on cores of their own, by the number and the place of active experts, and by
rows. The table of choices in docs/many-devices.md shows the time of slices over that of whole experts.
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
"""Places of the active experts."""


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
            # All rounds are alike; the fastest counts.
            router = Router(activate(args.experts, active, where == SPREAD), args.top_k, args.ranks * LAYERS)
            encoder = Encoder(router, rows, 1, LAYERS, args.hidden, args.width)
            cases[f"{args.ranks} ranks, {rows} rows, {active} experts, {where}"] = encoder, {}
    record = parser.open_record("ranks", args, argv)
    sweep(record, cases, args.ranks, args.rounds)
    tabulate_ranks(record.points).show(record.path)


def read_seconds(point: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a layer by layout, of the fastest round: the others contain the time of other programs."""
    if "seconds" in point:  # in records from before 2026-11-28
        return dict(point["seconds"])
    return {name: min(layout["layer_ms"]) / 1e3 for name, layout in point["layouts"].items()}


def tabulate_ranks(points: Mapping[str, Any]) -> Table:
    """Return a row for each point: milliseconds of a layer under each layout."""
    rows = {key: read_seconds(point) for key, point in points.items()}
    layouts = list(next(iter(rows.values())))
    cells = [[key, *(f"{seconds[name] * 1e3:.2f}" for name in layouts)] for key, seconds in rows.items()]
    return Table("An MoE layer on ranks, ms", ["", *layouts], cells)


if __name__ == "__main__":
    run_main("cost.ranks", main)
