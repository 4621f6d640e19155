"""Simulate expert-affinity dispatch: `python -m benchmark.affinity [SCENARIO...]`.

The simulation sends requests with held-out text to several replicas. It uses the model's own routing and the same
dispatcher as a server. The dispatcher's table is calibrated on different text.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from benchmark.affinity.report import name_rule, plot_affinity, point_key, tabulate_affinity
from benchmark.affinity.routing import Routing, read_routing
from benchmark.affinity.simulation import SCENARIOS, ByAffinity, RoundRobin, make_traffic, simulate
from benchmark.affinity.texts import make_table
from benchmark.common.command import Parser, run_main
from benchmark.common.paths import BUILD, TEXTS, TRAINED
from benchmark.common.plot import draw
from benchmark.common.record import Record
from benchmark.common.sweep import fill
from benchmark.quality.model import load_model
from benchmark.quality.text import load_sequences
from sglang_xshare.affinity.decision import DEFAULT
from sglang_xshare.affinity.table import Table
from sglang_xshare.parser import LARGEST, between

ROUND_ROBIN = "round robin"
MAX_LIFE = 128


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the table and draw the picture."""
    parser = Parser("benchmark.affinity", __doc__)
    names = f"{', '.join(SCENARIOS)} (default: all)"
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", default=SCENARIOS, help=names)
    parser.add_checkpoint(TRAINED, TEXTS)
    parser.add_numbers("replicas", (2, 4, 8), "replicas of the mixed traffic")
    parser.add_numbers("bounds", (1.1, DEFAULT, 1.5), "bounds of the load", between(1, LARGEST))
    parser.add_count("per_domain", 60, "sequences of each domain")
    parser.add_count("prompt", 64, "tokens a prompt")
    parser.add_count("requests", 1200, "requests of a run")
    parser.add_count("seeds", 8, "runs of each case")
    parser.add_count("calibration", 20_000, "tokens of each domain that the table is calibrated on")
    parser.add_record(BUILD / "affinity")
    args = parser.parse_args(argv)
    for name in args.scenarios:
        if name not in SCENARIOS:
            parser.error(f"SCENARIO must be one of {', '.join(SCENARIOS)} (got {name!r})")
    record = parser.open_record("affinity", args, argv)
    measure(args, record)
    tabulate_affinity(record.points).show(record.path)
    draw(plot_affinity(record.points), args.out / "affinity.png")


def measure(args: argparse.Namespace, record: Record) -> None:
    """Simulate all cases that are missing in the record."""
    cases = [(name, count) for name in args.scenarios for count in (args.replicas if name == "mixed" else [4])]
    if all(point_key(*case) in record for case in cases):
        return
    model = load_model(args.model)
    sequences = load_sequences(args.texts, args.model, args.prompt + MAX_LIFE + 1, args.per_domain)
    routing = read_routing(model, sequences, args.prompt)
    table = make_table(model, args.model, args.calibration)
    fill(record, {point_key(*case): partial(simulate_rules, routing, table, *case, args) for case in cases})


def simulate_rules(
    routing: Routing, table: Table, name: str, replicas: int, args: argparse.Namespace
) -> dict[str, object]:
    """Simulate round robin and expert affinity with each bound. Return the results of each rule by its name.

    All results are means over the seeds.
    """
    traffic = make_traffic(name, routing.domains, args.requests)

    def run(bound: float | None) -> dict[str, Any]:
        rules = [RoundRobin() if bound is None else ByAffinity(table, replicas, bound) for _ in range(args.seeds)]
        found = [simulate(routing, rule, replicas, traffic, seed) for seed, rule in enumerate(rules)]
        return {
            "active": fmean(one.active for one in found),
            "imbalance": fmean(one.imbalance for one in found),
            "course": [fmean(tenth) for tenth in zip(*(one.course for one in found), strict=True)],
        }

    rules = {ROUND_ROBIN: run(None)} | {name_rule(bound): run(bound) for bound in args.bounds}
    return {"scenario": name, "replicas": replicas, "rules": rules}


if __name__ == "__main__":
    run_main("affinity", main)
