"""Experiment `replay`: padding rows activate nothing when a CUDA graph is replayed, and counts follow the policy.

Part `server` is the live server: graphs of 8 rows only against one for every size, seven requests each; then what
masking padding rows alone gains where upstream's graphs pad. Part `tests` drives the stage in graphs of its own.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmark.common.comparison import is_measured
from benchmark.common.evidence import read_settled_totals, read_totals
from benchmark.common.record import Record
from benchmark.common.server import Server
from benchmark.common.variant import Variant, parse_variant
from benchmark.gpu import memory
from benchmark.gpu.checks import check, choose_parts, is_passed, run_tests
from benchmark.gpu.serving import Gain, Point, measure_rounds, serve_dummies
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
MASKING = [
    Variant("off", None, {}, UPSTREAM_SIZES),
    Variant("mask", None, {}, ("--mask-padding-experts", *UPSTREAM_SIZES)),
]
MASKED_AT = (9, 13)
TURNS = "turns"
"""The record's key of how many servers were up at once, where not all of them were."""
SPREAD = 0.05  # greedy continuations may part, since kernels of 7 and 8 rows round differently


def measure(record: Record, parts: Sequence[str]) -> None:
    """Measure what the record lacks; a failed test is recorded, and raised."""
    parts = choose_parts("replay", parts, PARTS)
    if "server" in parts:
        _measure_server(record)
    if "tests" in parts and not is_passed(record.points, "tests"):
        reason = check(record, "tests", partial(run_tests, [TESTS]))
        if reason:
            raise RuntimeError(reason)


def rows(points: Mapping[str, Any]) -> list[Row]:
    """What was tested, what the server counted, and the gain of masking."""
    found = [row for part in ("live", "masking") for row in memory.rows(points, part)]
    if TURNS in points:
        first, second = points[TURNS]["servers"]
        found.append(Row(f"servers of {MODEL}", f"{first}, then {second}: too many for the GPU's memory at once"))
    if all(name in points for name in LIVE):
        padded, exact, tighter = (points[name] for name in LIVE)
        text = f"{padded['rows']:.0f} in graphs of 8, {exact['rows']:.0f} in graphs of every size"
        found.append(Row("router rows counted, 7 requests", text, "equal", padded["rows"] == exact["rows"]))
        text = f"{padded['experts_after']:.2f} in graphs of 8, {exact['experts_after']:.2f} in graphs of every size"
        near = abs(padded["experts_after"] / exact["experts_after"] - 1) <= SPREAD
        found.append(Row("active experts, 7 requests", text, f"within {100 * SPREAD:.0f} %", near))
        counts = [padded["experts_before"], padded["experts_after"], tighter["experts_after"]]
        text = "off {:.1f}, add = 24 {:.1f}, add = 8 {:.1f}".format(*counts)
        found.append(Row("active experts by policy", text, "fewer each", counts[0] > counts[1] > counts[2]))
    for concurrency in MASKED_AT:
        point = points.get(masking_key(concurrency))
        if point is not None:
            found.append(Gain.read(point).row(f"masking alone, concurrency {concurrency}"))
    if "tests" in points:
        what = "replays of 1..16 requests, decode and verify"
        found.append(check_row(what, points["tests"], "exactly the live rows' experts"))
    return found


def masking_key(concurrency: int) -> str:
    """A point's key in the record."""
    return f"masking/concurrency={concurrency}"


def _measure_server(record: Record) -> None:
    live = {name: one for name, one in LIVE.items() if name not in record}
    missing = [n for n in MASKED_AT if not is_measured(record, masking_key(n))]
    servers = len(live) + len(MASKING) * bool(missing)
    if not servers:
        return
    # All at once where they fit, as five servers of twelve layers do on an H200: their start takes longer than what
    # they are measured for.
    if memory.fits(MODEL, servers, memory.read_free_bytes()):
        _serve(record, live, missing)
    else:
        record.add(TURNS, servers=[len(live), servers - len(live)])
        _serve(record, live, [])
        _serve(record, {}, missing)


def _serve(record: Record, live: Mapping[str, Variant], missing: Sequence[int]) -> None:
    """Servers of these variants, and of those of masking for what is missing of it."""
    variants = [*live.values(), *(MASKING if missing else [])]
    if not variants:
        return
    model = memory.fit_model(record, "live" if live else "masking", MODEL, len(variants))
    if model is None:
        return
    with serve_dummies(model, variants) as servers:
        for name, server in zip(live, servers, strict=False):
            record.add(name, **_count(server))
        points = [Point(masking_key(concurrency), MASKING, concurrency) for concurrency in missing]
        measure_rounds(record, model, points, servers[len(live) :])


def _count(server: Server) -> dict[str, float]:
    """Seven equally long requests at once; what the stage counted meanwhile, means a layer and step, rows in all."""
    prompts = [[1000 * request + token for token in range(1, 17)] for request in range(1, REQUESTS + 1)]
    before = read_totals(server)
    server.generate(prompts, max_new_tokens=TOKENS, ignore_eos=True)
    new = {name: total - before.get(name, 0.0) for name, total in read_settled_totals(server).items()}
    if not new.get("layer_steps"):
        raise RuntimeError(f"{server.name}: no step under policy was counted; {server.log} says more")
    means = {name: new[name] / new["layer_steps"] for name in ("experts_before", "experts_after")}
    return {**means, "rows": new["rows"], "layer_steps": new["layer_steps"]}
