"""Stage `server`: the real server at real shapes, policy off and on in alternating rounds, CUDA graphs on."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.common.variant import parse_variant
from benchmark.gpu.record import Record
from benchmark.gpu.serving import describe, gain, measure_rounds, serve_dummies
from benchmark.gpu.table import Row, at_least

CONCURRENCIES = {"qwen3-30b-a3b": (1, 4, 8, 16, 32), "gpt-oss-120b": (1, 4, 8, 16, 32), "gpt-oss-20b": (1, 4, 16)}
POLICY = "xshare:k0=1,add=24"
VARIANTS = ("off", POLICY)
ROUNDS = 3
# Percent. gpt-oss-120b with a budget of 24 on the same GPU: vLLM pull request 35551. Elsewhere: no loss above 1 %.
GAIN_BARS = {
    "qwen3-30b-a3b": {1: -1.0},
    "gpt-oss-120b": {1: -1.0, 4: 5.4, 8: 16.2, 16: 36.8, 32: 53.0},
    "gpt-oss-20b": {1: -1.0, 4: -1.0},
}


def measure(record: Record, models: Sequence[str]) -> None:
    """Measure every concurrency that the record lacks, model by model."""
    for name in models:
        if name not in CONCURRENCIES:
            raise ValueError(f"model {name}: allowed in stage server is {', '.join(CONCURRENCIES)}")
    variants = [parse_variant(text) for text in VARIANTS]
    for name in models or CONCURRENCIES:
        missing = [n for n in CONCURRENCIES[name] if point_key(name, n) not in record]
        if missing:
            with serve_dummies(name, variants) as servers:
                for concurrency in missing:
                    key = point_key(name, concurrency)
                    measure_rounds(record, key, name, variants, servers, concurrency, ROUNDS)


def rows(points: Mapping[str, Any]) -> list[Row]:
    """The policy's gain at every concurrency."""
    found = []
    for name, concurrencies in CONCURRENCIES.items():
        for concurrency in concurrencies:
            point = points.get(point_key(name, concurrency))
            if point is not None:
                what = f"{name}, {POLICY}, concurrency {concurrency}: {describe(point)}"
                found.append(at_least(what, gain(point), GAIN_BARS[name].get(concurrency), "% gain"))
    return found


def point_key(name: str, concurrency: int) -> str:
    """A point's key in the record."""
    return f"{name}/concurrency={concurrency}"
