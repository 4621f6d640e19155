"""What the stage costs: `python -m benchmark.stage [POLICY...]`, spelt as in `python -m benchmark.serving`.

Times the routing of a decode step, policies and vanilla in turns on one thread, and sets it against a decode step of a
served model: the share has to stay below 3 %. Prints a table; --out FOLDER keeps it as cost.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmark.common.machine import describe_machine
from benchmark.common.paths import LARGE
from benchmark.common.server import Server
from benchmark.common.variant import SPELLING, Variant, parse_variant

POLICIES = ("xshare:k0=1,add=24", "oea:k0=3")
MODEL = LARGE


def main() -> None:
    """Parse the command line, measure, print, keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.stage", description=__doc__)
    parser.add_argument("policies", nargs="*", default=POLICIES, metavar="POLICY", help=SPELLING)
    parser.add_argument("--model", type=Path, default=MODEL, help="the checkpoint whose decode step is the measure")
    parser.add_argument("--rows", type=int, default=16, help="rows of the step, requests of the server")
    parser.add_argument("--rounds", type=int, default=200, help="steps timed of each policy")
    parser.add_argument("--out", type=Path, help="folder for cost.json")
    args = parser.parse_args()
    try:
        variants = [parse_variant(text) for text in ("vanilla", *args.policies)]
        config = json.loads((args.model / "config.json").read_text())
    except (ValueError, OSError) as error:
        parser.error(str(error))
    step = time_decode_step(args.model, args.rows)
    routing = time_routing(variants, config, args.rows, args.rounds)
    report = summarize(routing, step, config["num_hidden_layers"])
    print_report(report, step, args.rows)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {**describe_machine(), "rows": args.rows, "decode_step_us": step * 1e6, "policies": report}
        (args.out / "cost.json").write_text(json.dumps(record, indent=1) + "\n")


def time_decode_step(model: Path, requests: int) -> float:
    """Seconds a decode step of a vanilla server takes: what 32 more tokens of a batch cost, median of three."""
    prompts = [[number + 1] * 8 for number in range(requests)]
    with Server(model, name="step") as server:

        def generate(tokens: int) -> float:
            server.post("/flush_cache", {})
            began = time.perf_counter()
            server.generate(prompts, max_new_tokens=tokens, ignore_eos=True)
            return time.perf_counter() - began

        generate(4)  # the first batch warms up
        return statistics.median((generate(40) - generate(8)) / 32 for _ in range(3))


def time_routing(variants: list[Variant], config: dict[str, Any], rows: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every step timed, by variant, in turns."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    import torch

    from benchmark.stage.routing import Routing, Shape

    torch.set_num_threads(1)
    shape = Shape(rows, config["num_hidden_layers"], config["num_experts"], config["num_experts_per_tok"])
    models = {variant.name: Routing(shape, variant.policy, variant.keys) for variant in variants}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 10):
        for name, model in models.items():
            spent = model.time_step()
            if number >= 10:
                seconds[name].append(spent)
    return seconds


def summarize(routing: dict[str, list[float]], step: float, layers: int) -> list[dict[str, Any]]:
    """A row a policy: microseconds a layer, in all and beyond vanilla, and what the latter is of a decode step."""
    base = statistics.median(routing["vanilla"])
    rows = []
    for name, seconds in routing.items():
        median = statistics.median(seconds)
        rows.append(
            {
                "policy": name,
                "layer_us": median / layers * 1e6,
                "added_us": (median - base) / layers * 1e6,
                "share_of_step": (median - base) / step,
            }
        )
    return rows


def print_report(report: list[dict[str, Any]], step: float, rows: int) -> None:
    """The table."""
    table = Table(title=f"Routing a layer of {rows} rows; a decode step takes {step * 1e3:.1f} ms")
    for heading in ("policy", "us a layer", "added to vanilla", "share of a decode step"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in report:
        share = f"{row['share_of_step']:.2%}"
        table.add_row(row["policy"], f"{row['layer_us']:.0f}", f"{row['added_us']:.0f}", share)
    Console().print(table)


if __name__ == "__main__":
    main()
