"""An MoE layer on ranks, whole experts beside slices: `python -m benchmark.cost.ranks`.

Times a layer on ranks that are processes on cores of their own, by how many experts are active and where they lie, and
by rows. The table of choices in docs/many-devices.md has what slices take over whole experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmark.common.command import Parser, positive, run_main
from benchmark.common.paths import BUILD
from benchmark.common.table import Table
from benchmark.expert_sharding.ranks import Encoder, measure

LAYERS = 2
SPREAD, FIRST = "spread", "on the first ranks"
"""Where the active experts lie."""


@dataclass(frozen=True)
class ActiveRouter:
    """Rows draw `top_k` of `active` experts: the first, or with `spread` of each rank; alike each `period` seeds."""

    experts: int
    active: int
    spread: bool
    top_k: int
    period: int

    def route(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [rows, k] int64, weights [rows, k] float32, equal and 1 in all)."""
        generator = torch.Generator().manual_seed(seed % self.period)
        drawn = torch.rand(rows, self.active, generator=generator).topk(self.top_k).indices
        ids = drawn * self.experts // self.active if self.spread else drawn
        return ids, torch.full((rows, self.top_k), 1 / self.top_k)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print the table."""
    parser = Parser("benchmark.cost.ranks", __doc__)
    swept = "(default: %(default)s)"
    parser.add_argument("--batch", nargs="+", type=positive, default=[16, 64], help=f"requests of a step {swept}")
    parser.add_argument("--active", nargs="+", type=positive, default=[16, 32, 64, 128], help=f"active experts {swept}")
    parser.add_count("ranks", 2, "ranks")
    parser.add_count("experts", 128, "experts of a layer")
    parser.add_count("top_k", 4, "experts of a row")
    parser.add_count("hidden", 256, "width of a row")
    parser.add_count("width", 1024, "width of an expert")
    parser.add_count("rounds", 7, "rounds, in which the layouts take turns")
    parser.add_record(BUILD / "cost")
    args = parser.parse_args(argv)
    for active in args.active:
        if not args.top_k <= active <= args.experts:
            parser.error(f"--active {active}: allowed is {args.top_k}, the experts of a row, to {args.experts}, all")
    record = parser.open_record("ranks", args, argv)
    for rows in args.batch:
        for active in args.active:
            for where in (SPREAD, FIRST) if active < args.experts else (SPREAD,):
                key = f"{args.ranks} ranks, {rows} rows, {active} experts, {where}"
                if key not in record:
                    print(key, flush=True)
                    router = ActiveRouter(args.experts, active, where == SPREAD, args.top_k, args.ranks * LAYERS)
                    encoder = Encoder(router, rows, 1, LAYERS, args.hidden, args.width)
                    # Of the fastest round: what other programs add to a round is none of the layout's.
                    found = measure(encoder, args.ranks, args.rounds)
                    record.add(key, seconds={name: min(times["layer_ms"]) / 1e3 for name, times in found.items()})
    tabulate_ranks(record.points).show(record.path)


def tabulate_ranks(points: Mapping[str, Any]) -> Table:
    """A row a point: milliseconds of a layer under each layout."""
    layouts = list(next(iter(points.values()))["seconds"])
    rows = [[key, *(f"{point['seconds'][name] * 1e3:.2f}" for name in layouts)] for key, point in points.items()]
    return Table("An MoE layer on ranks, ms", ["", *layouts], rows)


if __name__ == "__main__":
    run_main("cost.ranks", main)
