"""Measure placements of experts on servers: `python -m benchmark.expert_sharding.served`.

Each server has two ranks, each on its own core. One server has a slice of every expert on each rank, and the other has
whole experts. Both run SGLang's own code and the model's own router. Alternating rounds measure the time to the first
token and the output tokens per second.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.common.command import COUNTS, Parser, run_main
from benchmark.common.comparison import ONE_ROUND, Comparison, is_measured, measure
from benchmark.common.interval import format_spread
from benchmark.common.paths import BUILD, TEXTS, WIDENED
from benchmark.common.rounds import Workload, serve
from benchmark.common.server import bind_ranks
from benchmark.common.table import Table
from benchmark.common.variant import Variant
from benchmark.common.widened import prepare

RANKS = ("--tp", "2")
PLACEMENTS = ("ep", "shard")
"""The values of --expert-placement. The first one is the baseline."""
KEY = "placements"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = Parser("benchmark.expert_sharding.served", __doc__)
    parser.add_checkpoint(WIDENED, TEXTS)
    parser.add_counts(input_tokens=48, output_tokens=8)
    parser.add_record(BUILD / "expert-sharding")
    args = parser.parse_args(argv)
    record = parser.open_record("served", args, argv)
    if not is_measured(record, KEY):
        workload = Workload(args.model, args.texts, **{name: getattr(args, name) for name in COUNTS})
        variants = [Variant(name, None, {}, (*RANKS, "--expert-placement", name)) for name in PLACEMENTS]
        with serve(args.model, variants, prepare(args.model), env=bind_ranks(2)) as servers:
            measure(record, KEY, workload, variants, servers)
    tabulate_served(record.points).show(record.path)


def tabulate_served(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each placement."""
    comparison = Comparison.read(points[KEY])
    rows = [
        [row.name, *(format_spread(*cell) for cell in ((row.ttft_ms, 0), (row.throughput, 1), (row.paired_ratio, 2)))]
        for row in comparison.summaries
    ]
    doubt = f" {ONE_ROUND}" if comparison.rounds == 1 else ""
    note = f"{comparison.workload}: means [95 % t-interval]. Ratio: tokens/s over the first row's, by round.{doubt}"
    return Table(
        "Placements of experts on two ranks", ["placement", "first token, ms", "tokens/s", "ratio"], rows, note
    )


if __name__ == "__main__":
    run_main("expert_sharding.served", main)
