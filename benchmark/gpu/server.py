"""The experiment `server`, which measures real servers with and without a policy in alternating rounds.

The servers have the shapes of real models and use CUDA graphs. One server per model is switched between rounds, so both
variants have the same weights, memory and process. Only batch sizes at which the policy selects are measured.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmark.common.comparison import Comparison, format_experts, format_number, is_measured
from benchmark.common.interval import find_margin, format_rounds
from benchmark.common.record import Record
from benchmark.common.server import Server
from benchmark.common.table import Table
from benchmark.common.variant import OFF, parse_variant
from benchmark.gpu.checks import FAILED, explain
from benchmark.gpu.serving import Point, gain_row, list_percents, make_toggled, measure_rounds
from benchmark.gpu.table import Row

POLICY = "xshare"
WITHOUT_WARM_UP = "xshare:k0=0,add=24"
NOTHING_TO_DROP = "xshare:k0=0,add=31"
"""A policy that selects but drops almost no experts. Eight rows of gpt-oss activate 28 of at most 32 experts."""
GATE = "SGLANG_XSHARE_GATE"
"""The environment variable with the path of the gate file, see `wait_at_gate`."""


@dataclass(frozen=True)
class Case:
    """A server and the comparisons that are measured on it.

    - `concurrencies`: the numbers of concurrent requests, in the order of measurement.
    - `policy`: the policy with which the server starts.
    - `extra`: additional policies, each with one concurrency. The server needs no new graphs for them.
    - `bars`: the expected gain in percent for a policy and a concurrency.
    - `args`: a function that returns additional flags.
    - `env`: additional environment variables.
    - `temperature`: the sampling temperature.
    """

    model: str
    concurrencies: tuple[int, ...]
    policy: str = POLICY
    extra: Mapping[str, int] = field(default_factory=dict)
    bars: Mapping[tuple[str, int], float] = field(default_factory=dict)
    args: Callable[[], Sequence[str]] = tuple
    env: Mapping[str, str] = field(default_factory=dict)
    temperature: float = 1.0

    def points(self, name: str) -> list[Point]:
        """Return the comparisons of this case. `name` is the case's name in the record."""
        compared = [(self.policy, n) for n in self.concurrencies] + list(self.extra.items())
        off = parse_variant(OFF)
        return [
            Point(point_key(name, n, None if policy == self.policy else policy), (off, parse_variant(policy)), n)
            for policy, n in compared
        ]


# vLLM's pull request 35551 reports these gains for gpt-oss-120b on the same GPU. It also reports 5.4 % for 4 requests.
# 4 requests are not measured here, because they activate at most 16 experts and a budget of 24 drops none of them.
PUBLISHED = {(WITHOUT_WARM_UP, 8): 16.2, (WITHOUT_WARM_UP, 16): 36.8, (WITHOUT_WARM_UP, 32): 53.0}
NO_COMPARISON = "- (no comparison: the number of active experts was chosen to agree with vLLM's)"
"""The bar of a gain that reaches vLLM's. `moe_layer.COMMON_GPT_OSS` was chosen from vLLM's step times, among others."""
CASES = {
    "gpt-oss-120b-no-warm-up": Case(
        "gpt-oss-120b",
        (16, 8, 32),
        WITHOUT_WARM_UP,
        {NOTHING_TO_DROP: 8},
        PUBLISHED | {(NOTHING_TO_DROP, 8): -0.5},
    ),
    "qwen3-30b-a3b": Case("qwen3-30b-a3b", (16, 8, 32, 4)),
    "gpt-oss-20b": Case("gpt-oss-20b", (16, 4), bars={(POLICY, 4): -1.0}),
    "gpt-oss-120b": Case("gpt-oss-120b", (16, 8, 32, 4)),
}
PARTS = tuple(CASES)


def measure(record: Record, parts: Sequence[str]) -> str | None:
    """Measure the rounds that are missing in the record. Return the first failure, or None."""
    return measure_cases(record, {name: CASES[name] for name in parts})


def measure_cases(record: Record, cases: Mapping[str, Case]) -> str | None:
    """Measure the missing rounds of every case. Return the first failure, which does not stop other cases."""
    failed = []
    for name, case in cases.items():
        record.points.pop(FAILED + name, None)
        try:
            _measure_case(record, name, case)
        except Exception as error:
            failed.append(f"{name}: {explain(error)}")
            record.add(FAILED + name, reason=failed[-1])
    return failed[0] if failed else None


def _measure_case(record: Record, name: str, case: Case) -> None:
    missing = [point for point in case.points(name) if not is_measured(record, point.key)]
    if not missing:
        return
    with make_toggled(case.model, parse_variant(case.policy), case.args(), case.env) as server:
        wait_at_gate(server)
        measure_rounds(record, case.model, missing, [server, server], case.temperature)


def wait_at_gate(server: Server) -> None:
    """Create the gate file when the server is ready, and wait until another process removes the file.

    The run starts the first server early, in parallel with the checks. Other tasks use the GPU while this server waits.
    """
    gate = os.environ.pop(GATE, None)
    if gate is None:
        return
    Path(gate).touch()
    while Path(gate).exists():
        if server.returncode() is not None:
            raise RuntimeError(f"{server.name} ended while it was idle; {server.log} has the reason")
        time.sleep(0.1)


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row with the gain of every point at which the policy selected experts."""
    for name, case in CASES.items():
        for policy, concurrency, comparison in _list_compared(name, points):
            what = f"{comparison.workload.model.name}, {policy}, concurrency {concurrency}"
            row = gain_row(comparison, what, case.bars.get((policy, concurrency)), case.model)
            proves_nothing = (policy, concurrency) in PUBLISHED and row.passed and not row.is_open
            yield replace(row, bar=NO_COMPARISON, passed=None) if proves_nothing else row


def _list_compared(name: str, points: Mapping[str, Any]) -> Iterator[tuple[str, int, Comparison]]:
    """Yield (policy, concurrency, comparison with no policy) for each point at which the policy selected experts.

    Points of older versions of the case are included.
    """
    for key in points:
        if key.startswith(f"{name}/") and "/concurrency=" in key:
            comparison = Comparison.read(points[key])
            on = comparison.summaries[1]
            if on.experts_after is not None:
                yield on.name, comparison.workload.concurrency, comparison


HEADINGS = (
    "model",
    "policy",
    "at a time",
    "tokens/s",
    "gain",
    "each round",
    "ms a token",
    "active experts",
    "kept mass",
)
NOTE = """\
Policy off -> on: medians of alternating rounds on one server that is switched between rounds, with CUDA graphs, 128
tokens in and 256 out. Gain: percent of output tokens/s, the mean of the rounds' ratios (not the ratio of the medians) ±
half of its 95 % t-interval. Ms a token: bench_serving's median time per output token. Weights are random: speed is
real, and quality is not measured."""


def tabulate(points: Mapping[str, Any]) -> Table:
    """Return the table for a page. It contains the points with several rounds at which the policy selected experts."""
    cells = []
    for name in CASES:
        for policy, concurrency, comparison in sorted(_list_compared(name, points), key=lambda one: one[:2]):
            (off, on), percents, model = comparison.summaries, list_percents(comparison), comparison.workload.model.name
            if (margin := find_margin(percents)) is not None:
                speed = f"{off.throughput.median:.0f} -> {on.throughput.median:.0f}"
                token = f"{off.tpot_ms.median:.2f} -> {on.tpot_ms.median:.2f}"
                gain = f"{mean(percents):+.1f} ± {margin:.1f} %"
                counted = format_experts(on), format_number(on.kept_mass, 3)
                rounds = format_rounds(percents, 1)
                cells.append([model, policy, str(concurrency), speed, gain, rounds, token, *counted])
    return Table("Servers", HEADINGS, cells, NOTE, text_columns=2)


def point_key(name: str, concurrency: int, policy: str | None = None) -> str:
    """Return the key of a point in the record. `policy` is None for the case's own policy."""
    return "/".join(filter(None, [name, policy, f"concurrency={concurrency}"]))
