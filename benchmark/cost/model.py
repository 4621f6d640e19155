"""Fit the cost model of `sglang-xshare estimate` to this machine: `python -m benchmark.cost.model`.

Times an MoE layer on ranks that are processes on cores of their own, by how many experts are awake and where, by rows
and by where experts are; fits seconds a layer, a byte, an operation, an exchange and a byte sent; and says by how much
each time is missed by a fit to all others. Leaves the constants in machine.json, for `estimate --machine`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmark.common.command import Parser, one_line_errors, positive
from benchmark.common.paths import BUILD
from benchmark.common.record import Record
from benchmark.cost.fit import fit_layers, tabulate_layers
from benchmark.expert_sharding.ranks import Encoder, measure
from sglang_xshare.estimate.machine import Work, write_machine

LAYERS = 2
BYTES, INDEX_BYTES = 4, 8
"""Of a number in fp32, and of an expert's number."""


@dataclass(frozen=True)
class AwakeRouter:
    """Rows draw `top_k` of `awake` experts, and no other: the first ones, or as many of each rank where `spread`. Every
    `period` seeds draw the same again, so that all rounds of a measurement are alike.
    """

    experts: int
    awake: int
    spread: bool
    top_k: int
    period: int

    def route(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [rows, k] int64, weights [rows, k] float32, equal and 1 in all)."""
        generator = torch.Generator().manual_seed(seed % self.period)
        drawn = torch.rand(rows, self.awake, generator=generator).topk(self.top_k).indices
        ids = drawn * self.experts // self.awake if self.spread else drawn
        return ids, torch.full((rows, self.top_k), 1 / self.top_k)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, fit, print the table, write the constants."""
    parser = Parser("benchmark.cost.model", __doc__)
    swept = "(default: %(default)s)"
    parser.add_argument("--ranks", nargs="+", type=positive, default=[1, 2], help=f"ranks {swept}")
    parser.add_argument("--rows", nargs="+", type=positive, default=[16, 64], help=f"rows of a step {swept}")
    parser.add_argument("--awake", nargs="+", type=positive, default=[16, 32, 64, 128], help=f"experts awake {swept}")
    parser.add_count("experts", 128, "experts of a layer")
    parser.add_count("top_k", 4, "experts of a row")
    parser.add_count("hidden", 256, "width of a row")
    parser.add_count("width", 1024, "width of an expert")
    parser.add_count("rounds", 7, "rounds, in which the layouts take turns")
    parser.add_record(BUILD / "cost")
    args = parser.parse_args(argv)
    for awake in args.awake:
        if not args.top_k <= awake <= args.experts:
            parser.error(f"--awake {awake}: allowed is {args.top_k}, the experts of a row, to {args.experts}, all")
    record = parser.open_record("model", args, argv)
    for ranks in args.ranks:
        for rows in args.rows:
            for awake in args.awake:
                for spread in (True, False) if ranks > 1 and awake < args.experts else (True,):
                    where = "" if ranks == 1 else ", spread" if spread else ", on the first ranks"
                    key = f"{ranks} ranks, {rows} rows, {awake} experts{where}"
                    if key not in record:
                        print(key, flush=True)
                        router = AwakeRouter(args.experts, awake, spread, args.top_k, ranks * LAYERS)
                        encoder = Encoder(router, rows, 1, LAYERS, args.hidden, args.width)
                        add_point(record, key, encoder, ranks, args.rounds)
    tabulate_layers(record.points).show()
    machine = record.path.with_name("machine.json")
    write_machine(fit_layers(record.points).machine, machine)
    print(f"Record: {record.path}, constants: {machine}")


def add_point(record: Record, key: str, encoder: Encoder, ranks: int, rounds: int) -> None:
    """Time a layer under each layout, and keep what its fullest rank does beside its fastest round: what other programs
    add to a round is no property of the machine.
    """
    found = measure(encoder, ranks, rounds)
    layouts = {
        name: {"seconds": min(times["layer_ms"]) / 1e3, "work": asdict(count_work(encoder, name, ranks))}
        for name, times in found.items()
    }
    record.add(key, ranks=ranks, rows=encoder.batch, layouts=layouts)


def count_work(encoder: Encoder, layout: str, ranks: int) -> Work:
    """What the rank that a layer waits for does under a layout of `benchmark.expert_sharding`, mean of the layers."""
    own = encoder.batch // ranks
    routes = [encoder.route(own, rank) for rank in range(ranks)]
    by_layer = [torch.cat([route[layer][0].flatten() for route in routes]) for layer in range(encoder.layers)]
    total = sum((_count_layer(encoder, layout, ranks, ids) for ids in by_layer), Work())
    return total * (1 / encoder.layers)


def _count_layer(encoder: Encoder, layout: str, ranks: int, ids: torch.Tensor) -> Work:
    """`ids`: the expert of every slot, of all ranks."""
    weights = 3 * encoder.hidden * encoder.width
    counts = torch.bincount(ids, minlength=encoder.router.experts).view(ranks, -1)
    if layout == "shard":
        work = Work(1, int((counts > 0).sum()) * weights * BYTES / ranks, len(ids) * 2 * weights / ranks)
    else:
        fullest = int((counts > 0).sum(1).max())
        work = Work(1, fullest * weights * BYTES, int(counts.sum(1).max()) * 2 * weights)
    return work + _count_exchanges(encoder, layout, ranks, len(ids))


def _count_exchanges(encoder: Encoder, layout: str, ranks: int, slots: int) -> Work:
    """As the layout makes them: rows, ids and weights gathered and sums scattered, or counts, rows there and back."""
    if ranks == 1:
        return Work()
    others = (ranks - 1) / ranks
    row = encoder.hidden * BYTES
    if layout == "ep, all-to-all":
        return Work(near=3, near_bytes=2 * slots / ranks * row * others)
    gathered = encoder.batch * row + slots * (INDEX_BYTES + BYTES)
    return Work(near=4, near_bytes=(gathered + encoder.batch * row) * others)


if __name__ == "__main__":
    with one_line_errors("cost.model"):
        main()
