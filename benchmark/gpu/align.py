"""Stage `align`: the server with a policy, its slots sorted by upstream or by the selection (`--expert-policy-align`).

Stage `layer` times the same for a layer alone; what both say decides whether the flag becomes the default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmark.common.variant import parse_variant
from benchmark.gpu.record import Record
from benchmark.gpu.server import POLICY
from benchmark.gpu.serving import describe, gain, measure_rounds, serve_dummies
from benchmark.gpu.table import Row, at_least
from sglang_xshare.stage.alignment import TAKEN

MODEL = "qwen3-30b-a3b"
CONCURRENCIES, ROUNDS = (4, 16), 3


def measure(record: Record, models: Sequence[str]) -> None:
    """Measure every concurrency that the record lacks."""
    if models:
        raise ValueError(f"models {' '.join(models)}: stage align measures {MODEL} only; allowed is none")
    policy = parse_variant(POLICY)
    variants = [policy, replace(policy, name=f"{POLICY}, slots sorted", args=("--expert-policy-align",))]
    missing = [n for n in CONCURRENCIES if point_key(n) not in record]
    if missing or "taken" not in record:
        with serve_dummies(MODEL, variants) as servers:
            for concurrency in missing:
                measure_rounds(record, point_key(concurrency), MODEL, variants, servers, concurrency, ROUNDS)
            record.add("taken", taken=TAKEN in servers[1].log_text())


def rows(points: Mapping[str, Any]) -> list[Row]:
    """The gain over the same policy without the flag."""
    found = []
    if "taken" in points:
        taken = points["taken"]["taken"]
        found.append(Row("sorted slots", "taken by the runner" if taken else "not taken", "taken", taken))
    for concurrency in CONCURRENCIES:
        point = points.get(point_key(concurrency))
        if point is not None:
            what = f"{MODEL}, {POLICY}, slots sorted, concurrency {concurrency}: {describe(point)}"
            found.append(at_least(what, gain(point), None, "% gain"))
    return found


def point_key(concurrency: int) -> str:
    """A point's key in the record."""
    return f"concurrency={concurrency}"
