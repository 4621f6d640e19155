"""What one call of `select()` costs, by plan, backend and shape, beside upstream's own router on the same logits.

    python -m benchmark.kernels.selection [PLAN ...] [--rounds N] [--shapes 16x128 ...] [--out FILE]

CPU time on one thread, which does not count what else the machine does; medians over rounds in which all contestants
alternate. On a GPU `make gpu` times captured graphs instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmark.common.machine import describe_machine
from benchmark.common.plan import parse_plan
from sglang_xshare import Batch, Router, select

PLANS = (
    "vanilla",
    "xshare:k0=1,add=24",
    "xshare:k0=1,add_per_request=4",
    "oea:k0=3",
    "lynx-lat:retain=32",
    "lynx-acc:confidence=0.3",
    "moe-spec:budget=32",
)
SHAPES = ("16x64", "16x128", "64x128", "64x256")
UPSTREAM = "upstream"
BACKENDS = ("reference", "torch")
TOP_K = 8
TOKENS_PER_REQUEST = 4
# A timing shorter than this is noise.
SLICE_S = 0.005


@dataclass(frozen=True)
class Timing:
    """CPU microseconds a call: one number a round."""

    plan: str
    shape: str
    backend: str
    rounds: list[float]

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table a plan, and write every round as JSON. Returns the exit code."""
    arguments = _parse(argv)
    torch.set_num_threads(1)
    timings = []
    for shape in track(arguments.shapes, "measuring", console=Console(stderr=True)):
        timings += measure(shape, arguments.plans, arguments.rounds)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for plan in arguments.plans:
        console.print(make_table(plan, [timing for timing in timings if timing.plan in (plan, UPSTREAM)]))
    if arguments.out:
        record = {"machine": describe_machine(), "timings": [asdict(timing) for timing in timings]}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1))
    return 0


def measure(shape: str, plans: Sequence[str], rounds: int) -> list[Timing]:
    """Time upstream's router and every plan on both CPU backends, on one [rows, experts] of random logits."""
    rows, num_experts = map(int, shape.split("x"))
    logits = torch.randn(rows, num_experts, generator=torch.Generator().manual_seed(0))
    names, calls = [(UPSTREAM, UPSTREAM)], [_make_upstream(logits)]
    for plan in plans:
        names += [(plan, backend) for backend in BACKENDS]
        calls += [_make_call(logits, plan, backend) for backend in BACKENDS]
    times = time_alternating(calls, rounds)
    return [Timing(plan, shape, backend, spent) for (plan, backend), spent in zip(names, times, strict=True)]


def time_alternating(calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """CPU microseconds a call in every round, for each of the calls; each runs for about SLICE_S a round."""
    repeats = []
    for call in calls:
        _time(call, 3)  # the first calls import and fill caches
        repeats.append(max(1, round(SLICE_S / _time(call, 3))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for spent, call, repeat in zip(times, calls, repeats, strict=True):
            spent.append(_time(call, repeat) * 1e6)
    return times


def make_table(plan: str, timings: Sequence[Timing]) -> Table:
    """A row a shape, a column a backend: median microseconds, and how many times upstream's."""
    table = Table(title=f"{plan}: µs a call (times upstream's)", title_justify="left", box=box.SIMPLE_HEAD)
    backends = list(dict.fromkeys(timing.backend for timing in timings))
    table.add_column("rows x experts")
    for backend in backends:
        table.add_column(backend, justify="right")
    for shape in dict.fromkeys(timing.shape for timing in timings):
        row = {timing.backend: timing.median for timing in timings if timing.shape == shape}
        cells = [f"{row[backend]:,.0f} ({row[backend] / row[UPSTREAM]:.1f})" for backend in backends]
        table.add_row(shape, *cells)
    return table


def _time(call: Callable[[], object], repeat: int) -> float:
    start = time.process_time()
    for _ in range(repeat):
        call()
    return (time.process_time() - start) / repeat


def _make_upstream(logits: torch.Tensor) -> Callable[[], object]:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # or its import looks for a GPU
    from sglang.srt.layers.moe.topk import fused_topk_torch_native

    hidden_states = torch.empty(len(logits), 1)
    return lambda: fused_topk_torch_native(hidden_states, logits, TOP_K, True)


def _make_call(logits: torch.Tensor, spelling: str, backend: str) -> Callable[[], object]:
    plan = parse_plan(spelling)
    batch = Batch(tokens_per_request=TOKENS_PER_REQUEST if plan.add_per_request or plan.scope == "request" else 1)
    router = Router(TOP_K)
    return lambda: select(logits, plan, router, batch, backend=backend)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.kernels.selection",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plans", nargs="*", metavar="PLAN", help=f"such as {PLANS[1]} (default: {' '.join(PLANS)})")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="ROWSxEXPERTS")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, metavar="FILE", help="every round as JSON")
    arguments = parser.parse_args(argv)
    arguments.plans = arguments.plans or list(PLANS)
    try:
        for plan in arguments.plans:
            _make_call(torch.zeros(TOKENS_PER_REQUEST, 64), plan, "torch")()
    except ValueError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    sys.exit(main())
