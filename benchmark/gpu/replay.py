"""The experiment `replay`, which checks that padding rows activate no experts when a CUDA graph is replayed.

The part `server` compares two servers while each one answers seven requests. One server has only graphs of 8 rows, and
the other has graphs of every size. Both must count the same rows and nearly the same number of experts. A third server
has a smaller budget and must activate fewer experts. The part also measures the gain from masking the padding rows
without a policy. The part `tests` runs tests that capture their own graphs.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmark.common.comparison import Comparison, is_measured
from benchmark.common.evidence import read_settled_totals, read_totals
from benchmark.common.record import Record
from benchmark.common.server import Server
from benchmark.common.variant import Variant, parse_variant
from benchmark.gpu.checks import check, run_tests
from benchmark.gpu.serving import Point, gain_row, has_room, measure_rounds, serve_dummies
from benchmark.gpu.table import Row, check_row

PARTS = ("server", "tests")
TESTS = "test/benchmark/gpu/test_replay.py"
MODEL = "qwen3-30b-a3b-12-layers"
REQUESTS, TOKENS = 7, 64
UPSTREAM_SIZES = ("--cuda-graph-bs-decode", *(str(n) for n in (1, 2, 4, 8, 12, 16)))
PADDED = ("--cuda-graph-bs-decode", "8")
LIVE = {
    "padded": parse_variant("xshare:k0=1,add=24", PADDED),
    "exact": parse_variant("xshare:k0=1,add=24"),
    "tighter": parse_variant("xshare:k0=1,add=8", PADDED),
}
MASKING = (
    Variant("off", None, {}, UPSTREAM_SIZES),
    Variant("mask", None, {}, ("--mask-padding-experts", *UPSTREAM_SIZES)),
)
MASKED_AT = (9, 13)
SPREAD = 0.05  # greedy answers can differ, because kernels for 7 and for 8 rows round differently


def measure(record: Record, parts: Sequence[str]) -> str | None:
    """Measure all points that are missing in the record. Return the failure of the tests, or None."""
    if "server" in parts:
        _measure_servers(record)
    return check(record, "tests", partial(run_tests, TESTS)) if "tests" in parts else None


def _measure_servers(record: Record) -> None:
    live = {name: one for name, one in LIVE.items() if name not in record}
    points = [Point(masking_key(n), MASKING, n) for n in MASKED_AT if not is_measured(record, masking_key(n))]
    # If the GPU has enough memory, like an H200, all servers start together, because their start takes longer than
    # their rounds.
    for some, missing in [(live, points)] if has_room() else [(live, []), ({}, points)]:
        variants = [*some.values(), *(MASKING if missing else [])]
        if variants:
            with serve_dummies(MODEL, variants) as started:
                for name, server in zip(some, started, strict=False):
                    record.add(name, **_count(server))
                measure_rounds(record, MODEL, missing, started[len(some) :])


def _count(server: Server) -> dict[str, float]:
    """Send seven requests of equal length, and return the counts of the server.

    Experts are means per layer and step. Rows and layer steps are totals.
    """
    prompts = [[1000 * request + token for token in range(1, 17)] for request in range(1, REQUESTS + 1)]
    before = read_totals(server)
    server.generate(prompts, max_new_tokens=TOKENS, ignore_eos=True)
    new = {name: total - before.get(name, 0.0) for name, total in read_settled_totals(server).items()}
    if not new.get("layer_steps"):
        raise RuntimeError(f"{server.name}: no step under policy was counted; {server.log} has the reason")
    means = {name: new[name] / new["layer_steps"] for name in ("experts_before", "experts_after")}
    return {**means, "rows": new["rows"], "layer_steps": new["layer_steps"]}


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of this experiment: the counts of the servers, the gain from masking, and the tests."""
    if all(name in points for name in LIVE):
        padded, exact, tighter = (points[name] for name in LIVE)
        text = f"{padded['rows']:.0f} in graphs of 8, {exact['rows']:.0f} in graphs of every size"
        yield Row("router rows counted, 7 requests", text, "equal", padded["rows"] == exact["rows"])
        text = f"{padded['experts_after']:.2f} in graphs of 8, {exact['experts_after']:.2f} in graphs of every size"
        near = abs(padded["experts_after"] / exact["experts_after"] - 1) <= SPREAD
        yield Row("active experts, 7 requests", text, f"within {100 * SPREAD:.0f} %", near)
        counts = [padded["experts_before"], padded["experts_after"], tighter["experts_after"]]
        text = "off {:.1f}, add = 24 {:.1f}, add = 8 {:.1f}".format(*counts)
        yield Row("active experts by policy", text, "fewer each", counts[0] > counts[1] > counts[2])
    for concurrency in MASKED_AT:
        if masking_key(concurrency) in points:
            comparison = Comparison.read(points[masking_key(concurrency)])
            yield gain_row(comparison, f"masking alone, concurrency {concurrency}")
    if "tests" in points:
        what = "replays of 1..16 requests, decode and verify"
        yield check_row(what, points["tests"], "exactly the live rows' experts")


def masking_key(concurrency: int) -> str:
    """Return the key of a point in the record."""
    return f"masking/concurrency={concurrency}"
