"""Expert-affinity dispatch, simulated: `python -m benchmark.affinity [SCENARIO...]`.

The model's own routing of held-out text, requests that come and go on replicas, step by step, and the dispatcher that a
server runs. Its table is calibrated on other text.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict

from benchmark.affinity.report import name_rule, plot_affinity, point_key, tabulate_affinity
from benchmark.affinity.routing import Routing, read_routing
from benchmark.affinity.simulation import SCENARIOS, ByAffinity, Outcome, RoundRobin, Rule, make_traffic, simulate
from benchmark.affinity.texts import make_table
from benchmark.common.command import Parser, positive, run_main
from benchmark.common.paths import BUILD, TEXTS, TRAINED
from benchmark.common.record import Record
from benchmark.quality.model import load_model
from benchmark.quality.text import load_sequences
from sglang_xshare.affinity.decision import DEFAULT
from sglang_xshare.affinity.table import Table
from sglang_xshare.parser import LARGEST, between

AT_LEAST_ONE = between(1, LARGEST)
ROUND_ROBIN = "round robin"
MAX_LIFE = 128


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate into the record, print the table, write the plot."""
    parser = Parser("benchmark.affinity", __doc__)
    names = f"{', '.join(SCENARIOS)} (default: all)"
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", default=SCENARIOS, help=names)
    parser.add_checkpoint(TRAINED, TEXTS)
    parser.add_argument("--replicas", nargs="+", type=positive, default=(2, 4, 8), metavar="N", help="of mixed traffic")
    parser.add_argument("--bounds", nargs="+", type=AT_LEAST_ONE, default=(1.1, DEFAULT, 1.5), metavar="B")
    parser.add_count("per_domain", 60, "sequences of each domain")
    parser.add_count("prompt", 64, "tokens a prompt")
    parser.add_count("requests", 1200, "requests of a run")
    parser.add_count("seeds", 8, "runs of each case")
    parser.add_count("calibration", 20_000, "tokens of each domain that the table is calibrated on")
    parser.add_record(BUILD / "affinity")
    args = parser.parse_args(argv)
    for name in args.scenarios:
        if name not in SCENARIOS:
            parser.error(f"scenario {name!r}: allowed are {', '.join(SCENARIOS)}")
    record = parser.open_record("affinity", args, argv)
    measure(args, record)
    tabulate_affinity(record.points).show()
    plot_affinity(record.points, args.out / "affinity.png")
    print(f"Record: {record.path}, plot beside it")


def measure(args: argparse.Namespace, record: Record) -> None:
    """Simulate what the record lacks."""
    cases = [(name, count) for name in args.scenarios for count in (args.replicas if name == "mixed" else [4])]
    missing = [(name, count) for name, count in cases if point_key(name, count) not in record]
    if not missing:
        return
    model = load_model(args.model)
    sequences = load_sequences(args.texts, args.model, args.prompt + MAX_LIFE + 1, args.per_domain)
    routing = read_routing(model, sequences, args.prompt)
    table = make_table(model, args.model, args.calibration)
    for name, count in missing:
        print(f"{name}, {count} replicas ...", flush=True)
        rules = simulate_rules(routing, table, name, count, args)
        record.add(point_key(name, count), scenario=name, replicas=count, rules=rules)


def simulate_rules(
    routing: Routing, table: Table, name: str, replicas: int, args: argparse.Namespace
) -> dict[str, dict[str, object]]:
    """What round robin and affinity within each bound come to, by name: means over the seeds."""
    traffic = make_traffic(name, routing, args.requests)
    rules: dict[str, Callable[[], Rule]] = {ROUND_ROBIN: RoundRobin}
    for bound in args.bounds:
        rules[name_rule(bound)] = lambda bound=bound: ByAffinity(table, replicas, bound)  # type: ignore[misc]
    return {
        rule: asdict(_mean([simulate(routing, make(), replicas, traffic, seed) for seed in range(args.seeds)]))
        for rule, make in rules.items()
    }


def _mean(outcomes: Sequence[Outcome]) -> Outcome:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return Outcome(
        active=mean([one.active for one in outcomes]),
        imbalance=mean([one.imbalance for one in outcomes]),
        worst=max(one.worst for one in outcomes),
        course=[mean(tenth) for tenth in zip(*(one.course for one in outcomes), strict=True)],
    )


if __name__ == "__main__":
    run_main("affinity", main)
