"""Experiment `server`: the real server at real shapes, off and on in alternating rounds, CUDA graphs on.

Last a policy against itself, its slots sorted by upstream or by the selection (`--expert-policy-align`); experiment
`layer` times the same for a layer alone, and what both say decides whether the flag becomes the default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmark.common.comparison import is_measured
from benchmark.common.record import Record
from benchmark.common.server import Server
from benchmark.common.variant import OFF, Variant, parse_variant
from benchmark.gpu.serving import Gain, measure_rounds, serve_dummies
from benchmark.gpu.table import Row, at_least
from sglang_xshare.stage.alignment import TAKEN

POLICY = "xshare:k0=1,add=24"
OFF_AND_ON = (parse_variant(OFF), parse_variant(POLICY))
ALIGNED = replace(OFF_AND_ON[1], name=f"{POLICY}, slots sorted", args=("--expert-policy-align",))
ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """Two variants of a model, and the concurrencies at which they are compared; `bars` are percent of gain."""

    model: str
    concurrencies: tuple[int, ...]
    variants: tuple[Variant, Variant] = OFF_AND_ON
    bars: Mapping[int, float] = field(default_factory=dict)


# gpt-oss-120b's gains with a budget of 24 on the same GPU: vLLM pull request 35551. Elsewhere: no loss above 1 %.
CASES = {
    "qwen3-30b-a3b": Case("qwen3-30b-a3b", (1, 4, 8, 16, 32), bars={1: -1.0}),
    "gpt-oss-120b": Case("gpt-oss-120b", (1, 4, 8, 16, 32), bars={1: -1.0, 4: 5.4, 8: 16.2, 16: 36.8, 32: 53.0}),
    "gpt-oss-20b": Case("gpt-oss-20b", (1, 4, 16), bars={1: -1.0, 4: -1.0}),
    "qwen3-30b-a3b-aligned": Case("qwen3-30b-a3b", (4, 16), (OFF_AND_ON[1], ALIGNED)),
}


def measure(record: Record, models: Sequence[str]) -> None:
    """Measure every concurrency that the record lacks, case by case."""
    for name in models:
        if name not in CASES:
            raise ValueError(f"model {name}: allowed in experiment server is {', '.join(CASES)}")
    for name in models or CASES:
        case = CASES[name]
        missing = [n for n in case.concurrencies if not is_measured(record, point_key(name, n))]
        if missing or (_is_aligned(case) and taken_key(name) not in record):
            with serve_dummies(case.model, case.variants) as servers:
                for concurrency in missing:
                    key = point_key(name, concurrency)
                    measure_rounds(record, key, case.model, case.variants, servers, concurrency, ROUNDS)
                _add_taken(record, name, servers)


def rows(points: Mapping[str, Any]) -> list[Row]:
    """The gain at every concurrency, and whether the runner took the slots it was to take sorted."""
    found = []
    for name, case in CASES.items():
        if taken_key(name) in points:
            taken = points[taken_key(name)]["taken"]
            found.append(Row(f"{name}, sorted slots", "taken by the runner" if taken else "not taken", "taken", taken))
        for concurrency in case.concurrencies:
            point = points.get(point_key(name, concurrency))
            if point is not None:
                gain = Gain.read(point)
                what = f"{name}, {case.variants[1].name}, concurrency {concurrency}: {gain}"
                found.append(at_least(what, gain.percent, case.bars.get(concurrency), "% gain"))
    return found


def point_key(name: str, concurrency: int) -> str:
    """A point's key in the record."""
    return f"{name}/concurrency={concurrency}"


def taken_key(name: str) -> str:
    """The key of what the runner did with slots that the selection had sorted."""
    return f"{name}/taken"


def _add_taken(record: Record, name: str, servers: Sequence[Server]) -> None:
    if _is_aligned(CASES[name]):
        record.add(taken_key(name), taken=TAKEN in servers[1].log_text())


def _is_aligned(case: Case) -> bool:
    return ALIGNED in case.variants
