"""Measure the time that selection takes: `python -m benchmark.cost [POLICY...]`.

A policy is spelt as in `python -m benchmark.serving`. The benchmark compares select() with SGLang's router on the same
logits. It also measures the routing in a decode step, with and without a policy, and a whole decode step of a server.
On a GPU, `make gpu` measures captured CUDA graphs instead.
"""

import argparse
import json
import os
import re
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmark.common.command import Parser, policy, run_main
from benchmark.common.comparison import is_measured
from benchmark.common.comparison import measure as measure_rounds
from benchmark.common.paths import BUILD, TEXTS, WIDENED
from benchmark.common.record import Record
from benchmark.common.rounds import Workload, serve
from benchmark.common.sweep import fill
from benchmark.common.variant import BASELINE, PLAN_SPELLING, parse_plan, parse_variant
from benchmark.common.widened import prepare
from benchmark.cost.report import ROUTING, STEP, shape_key, tabulate_cost

POLICIES = (
    "xshare:k0=1,add=24",
    "xshare:k0=1,mass=0.9",
    "xshare:k0=1,add_per_request=4",
    "oea:k0=3",
    "lynx-lat:retain=40",
    "lynx-acc:confidence=0.05,max_voters=16",
    "moe-spec:budget=32",
)
SHAPES = ("16x64", "16x128", "64x128", "64x256")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = Parser("benchmark.cost", __doc__)
    parser.add_policies(policy, POLICIES, PLAN_SPELLING)
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, metavar="ROWSxEXPERTS")
    parser.add_checkpoint(WIDENED, TEXTS)
    parser.add_count("batch", 16, "requests of a step")
    parser.add_count("rounds", 100, "calls and steps timed of each policy")
    parser.add_count("step_tokens", 32, "tokens a request of that server")
    parser.add_count("step_rounds", 5, "batches of that server")
    parser.add_record(BUILD / "cost")
    args = parser.parse_args(argv)
    for text in args.policies:
        parse_plan(text)
    record = parser.open_record("cost", args, argv)
    measure(args, record)
    tabulate_cost(record.points).show(record.path)


def measure(args: argparse.Namespace, record: Record) -> None:
    """Measure all points that are missing in the record."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    import torch

    from benchmark.cost.routers import time_selection

    torch.set_num_threads(1)

    def time_shape(shape: str) -> dict[str, Any]:
        rows, experts = map(int, shape.split("x"))
        times = time_selection(rows, experts, args.policies, args.rounds)
        return {"seconds": {name: median(spent) for name, spent in times.items()}}

    fill(record, {shape_key(shape): partial(time_shape, shape) for shape in args.shapes})
    if not is_measured(record, STEP):
        measure_step(args, record)
    fill(record, {ROUTING: partial(measure_routing, args)})


def measure_step(args: argparse.Namespace, record: Record) -> None:
    """Measure the decode step of a server without a policy, in full batches."""
    counts = {"requests": args.batch, "concurrency": args.batch, "output_tokens": args.step_tokens}
    workload = Workload(args.model, args.texts, rounds=args.step_rounds, **counts)
    variants = [parse_variant(BASELINE)]
    with serve(args.model, variants, prepare(args.model)) as servers:
        measure_rounds(record, STEP, workload, variants, servers)


def measure_routing(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the routing of one decode step under every policy that selects in decode steps."""
    from benchmark.cost.routers import DecodeShape, time_routing
    from sglang_xshare.policies.schedule import build_schedule

    config = json.loads((args.model / "config.json").read_text())
    layers, experts, top_k = (config[key] for key in ("num_hidden_layers", "num_experts", "num_experts_per_tok"))
    variants = [parse_variant(BASELINE)]
    for variant in map(parse_variant, args.policies):
        try:
            build_schedule(variant.policy or BASELINE, variant.keys, speculative=False)
        except ValueError as error:
            print(f"{variant.name}: not in plain decode: {error}", flush=True)
        else:
            variants.append(variant)
    times = time_routing(variants, DecodeShape(args.batch, layers, experts, top_k), args.rounds)
    seconds = {variant.name: median(spent) for variant, spent in zip(variants, times, strict=True)}
    return {"seconds": seconds, "rows": args.batch, "layers": layers, "model": args.model.name}


def _shape(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"must be ROWSxEXPERTS, such as {SHAPES[0]} (got {text!r})")
    return text


if __name__ == "__main__":
    run_main("cost", main)
