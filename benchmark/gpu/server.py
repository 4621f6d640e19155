"""Experiment `server`: the real server at real shapes, off and on in alternating rounds, CUDA graphs on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmark.common.comparison import Comparison, format_experts, format_number, is_measured
from benchmark.common.record import Record
from benchmark.common.table import Table
from benchmark.common.variant import OFF, Variant, parse_variant
from benchmark.gpu import memory
from benchmark.gpu.checks import choose_parts
from benchmark.gpu.serving import FINE_ROUNDS, ROUNDS, Gain, measure_rounds, serve_dummies
from benchmark.gpu.table import Row

POLICY = "xshare"
OFF_AND_ON = (parse_variant(OFF), parse_variant(POLICY))
WITHOUT_WARM_UP = "xshare:k0=0,add=24"
LOSS = -1.0
"""The bar of a small batch: no loss above 1 %."""


@dataclass(frozen=True)
class Case:
    """Two variants of a model, the concurrencies to compare them at, in order; `bars` are percent of gain."""

    model: str
    concurrencies: tuple[int, ...] = (16, 4, 8, 32, 1)
    variants: tuple[Variant, Variant] = OFF_AND_ON
    bars: Mapping[int, float] = field(default_factory=dict)

    def rounds(self, concurrency: int) -> int:
        """More where a percent decides."""
        return FINE_ROUNDS if self.bars.get(concurrency) == LOSS else ROUNDS


# gpt-oss-120b's gains on the same GPU: vLLM pull request 35551, whose budget of 24 has no warm-up. With uniform routing
# ours, k0 = 1, leaves 29.3, 39.2 and 52.5 of 128 at 8, 16 and 32 rows, theirs 24: two rows, and no bar of theirs
# on ours. Two of 30 layers fit on an H200, three do not, so each is a comparison of its own.
CASES = {
    "qwen3-30b-a3b": Case("qwen3-30b-a3b", bars={1: LOSS}),
    "gpt-oss-20b": Case("gpt-oss-20b", (16, 1, 4), bars={1: LOSS, 4: LOSS}),
    "gpt-oss-120b-no-warm-up": Case(
        "gpt-oss-120b-30-layers",
        (16, 4, 8, 32),
        (OFF_AND_ON[0], parse_variant(WITHOUT_WARM_UP)),
        {4: 5.4, 8: 16.2, 16: 36.8, 32: 53.0},
    ),
    "gpt-oss-120b": Case("gpt-oss-120b-30-layers", bars={1: LOSS}),
}


def measure(record: Record, parts: Sequence[str]) -> None:
    """Measure each concurrency that the record lacks, with as many layers as fit; without any, none."""
    for name in choose_parts("server", parts, CASES):
        case = CASES[name]
        missing = [n for n in case.concurrencies if not is_measured(record, point_key(name, n))]
        if missing:
            model = memory.fit_model(record, name, case.model, len(case.variants))
            if model is None:
                continue
            with serve_dummies(model, case.variants) as servers:
                for concurrency in missing:
                    key = point_key(name, concurrency)
                    measure_rounds(record, key, model, case.variants, servers, concurrency, case.rounds(concurrency))


def rows(points: Mapping[str, Any]) -> list[Row]:
    """What was cut, and the gain at every concurrency."""
    found = []
    for name, case in CASES.items():
        found += memory.rows(points, name)
        for concurrency in sorted(case.concurrencies):
            point = points.get(point_key(name, concurrency))
            if point is not None:
                gain = Gain.read(point)
                what = f"{gain.model}, {case.variants[1].name}, concurrency {concurrency}"
                found.append(gain.row(what, case.bars.get(concurrency), case.model))
    return found


HEADINGS = ("model", "policy", "at a time", "tokens/s", "gain", "ms a token", "active experts", "kept mass")
NOTE = (
    "Policy off -> on, medians of alternating rounds over servers that stay up, CUDA graphs on, 128 tokens in and 256 "
    "out. Gain: percent of output tokens/s, the mean of the rounds' ratios ± two standard errors, not the ratio of the "
    "medians. Ms a token: bench_serving's median time per output token. -: the policy never acted. Weights are random: "
    "speed is real, loss means nothing here."
)
GREEDY = (
    " Tokens are greedy: of random weights they are soon the same in several rows, which then share experts, so that a "
    "policy has less to gain than on the trained model, of which 16 rows have 48.8 active (OEA)."
)


def tabulate(points: Mapping[str, Any]) -> Table:
    """What the table of a page shows of the points that have more than one round."""
    cells, is_greedy = [], False
    for name, case in CASES.items():
        for concurrency in sorted(case.concurrencies):
            point = points.get(point_key(name, concurrency))
            if point is None or (comparison := Comparison.read(point)).rounds == 1:
                continue
            gain, is_greedy = Gain.read(point), is_greedy or not comparison.workload.temperature
            speed = f"{gain.off.throughput.median:.0f} -> {gain.on.throughput.median:.0f}"
            token = f"{gain.off.tpot_ms.median:.2f} -> {gain.on.tpot_ms.median:.2f}"
            percent = f"{gain.percent:+.1f} ± {gain.error:.1f} %"
            counted = format_experts(gain.on), format_number(gain.on.kept_mass, 3)
            cells.append([gain.model, case.variants[1].name, str(concurrency), speed, percent, token, *counted])
    return Table("Servers", HEADINGS, cells, NOTE + GREEDY * is_greedy, text_columns=2)


def point_key(name: str, concurrency: int) -> str:
    """A point's key in the record."""
    return f"{name}/concurrency={concurrency}"
