"""The experiment `selection`, which compares the selection kernel with the reference and with SGLang's router.

- The part `ids` compares the kernel's expert ids with the reference.
- The part `times` measures the kernel and SGLang's fused router in CUDA graphs with many calls. Both receive the same
  logits. The kernel replaces the router, so it also does the router's work.
- The part `shapes` measures how a batch is divided into programs. Afterwards, the kernel uses the fastest shape.
- The part `tests` runs the tests of the kernels, which compile for minutes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from itertools import cycle, product
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch

from benchmark.common.record import Record
from benchmark.common.variant import parse_plan
from benchmark.gpu.checks import WORKERS, check, explain, measure_points, run_tests
from benchmark.gpu.shapes import describe, measure_shapes
from benchmark.gpu.table import Row, check_row
from benchmark.gpu.timing import repeat, run_dry, time_alternating, time_graph
from sglang_xshare import Batch, Router, RunnerSlots, select
from sglang_xshare.selection.triton_kernel import supports

PARTS = ("ids", "times", "shapes", "tests")
TESTS = (
    "test/selection/test_triton.py",
    "test/selection/test_backends.py",
    "test/selection/test_alignment.py",
    "test/selection/test_triton_budgets.py",
    "test/selection/test_routing_data.py",
    "test/stage/test_mask.py",
)
NOT_UPSTREAM = ("-k", "not upstream")  # SGLang's own kernels are not tested here
SHOWN = 10  # maximum number of recorded differences
TIME_BAR = 2.0  # allowed multiple of the time of SGLang's fused router, which does only a part of the kernel's work
PLANS = (
    "xshare",
    "xshare:k0=1,add=24",
    "xshare:k0=1,add_per_request=4",
    "xshare:k0=1,target_per_rank=5",
    "oea:k0=3",
    "lynx-lat:retain=32",
    "moe-spec:budget=32",
)
TIMED = ((16, 128), (16, 256), (64, 128), (64, 256), (16, 512))
"""The rows and experts for which times are measured."""
CHECKED = tuple(product((1, 7, 16, 64, 256), (8, 16, 60, 128, 160, 256, 384, 512)))
"""The rows and experts for which only the ids are compared."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANKS, TOP_K, TOKENS_PER_REQUEST = 8, 8, 4
CALLS, ROUNDS = 50, 10
"""The number of calls in a graph, and the number of rounds. The many calls hide the launch of the graph."""
DEVICE = "cuda"
Case = tuple[int, int, str, torch.dtype, bool]
"""A test case: (rows, experts, plan, dtype, whether the logits have ties)."""


def measure(record: Record, parts: Sequence[str]) -> str | None:
    """Measure all points that are missing in the record. Return the first failure, or None."""
    failed: list[str | None] = []
    if "ids" in parts:
        failed.append(check(record, "cases", _compare_with_reference))
    if "times" in parts:
        failed.append(measure_points(record, list_points(["times"])))
    if "shapes" in parts:
        failed.append(measure_shapes(record))
    if "tests" in parts:
        failed += [check(record, path, partial(run_tests, path, NOT_UPSTREAM)) for path in TESTS]
    return next(filter(None, failed), None)


def list_points(parts: Sequence[str]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return a dict from the key of each point to the function that measures it."""
    return {
        f"{policy}/{rows}x{experts}": partial(time_kernel, rows, experts, policy)
        for (rows, experts), policy in product(TIMED, PLANS)
        if "times" in parts
    }


def make_cases() -> list[Case]:
    """Return the test cases.

    They contain every shape of `CHECKED`, with varying plans and dtypes. They also contain every plan with every shape
    of `TIMED`, in bf16.
    """
    experts = dict.fromkeys(one for _, one in CHECKED)
    chosen = dict(zip(experts, zip(cycle(PLANS), cycle(DTYPES), strict=False), strict=False))
    cases = [(rows, experts, *chosen[experts], tied) for (rows, experts), tied in product(CHECKED, (False, True))]
    return cases + [(*shape, plan, torch.bfloat16, True) for shape, plan in product(TIMED, PLANS)]


def _compare_with_reference() -> dict[str, Any]:
    cases = make_cases()
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        for call in list_points(["times"]).values():
            pool.submit(run_dry, call)  # a failure is reported when the call is timed
        differences = list(filter(None, pool.map(find_difference, *zip(*cases, strict=True))))
    if differences:
        reason = f"{len(differences)} of {len(cases)} cases differ, the first: {differences[0]}"
        return {"reason": reason, "differences": differences[:SHOWN]}
    return {"equal": len(cases)}


def find_difference(rows: int, experts: int, spelling: str, dtype: torch.dtype, tied: bool) -> str | None:
    """Compare the kernel with the reference on random logits. One tenth of the rows is padding.

    Return a description of the difference or of the failure. Return None if the results are equal.
    """
    case = f"{spelling} on {rows} x {experts} {dtype}{', tied' * tied}"
    try:
        field = _find_field(rows, experts, spelling, dtype, tied)
    except Exception as error:  # if a kernel does not compile or launch, only this case fails
        return f"{case}: {explain(error)}"
    return field and f"{field} of {case}: not the reference's"


def _find_field(rows: int, experts: int, spelling: str, dtype: torch.dtype, tied: bool) -> str | None:
    logits = _make_logits(rows, experts, dtype)
    logits = logits.round() if tied else logits
    plan, router, ranks = parse_plan(spelling, rows), Router(min(TOP_K, experts)), _make_ranks(experts)
    batch = Batch(torch.arange(rows, device=DEVICE) % 10 != 7, count_tokens(spelling, rows))
    if not supports(plan, router, batch, rows, experts):
        raise RuntimeError("the kernel does not serve this case")
    found, expected = (select(logits, plan, router, batch, ranks, backend) for backend in ("triton", "reference"))
    for field in ("topk_ids", "selected", "active", "vanilla_active"):
        if not torch.equal(getattr(found, field), getattr(expected, field)):
            return field
    found, expected = (
        select(logits, plan, router, batch, ranks, backend, slots=RunnerSlots()) for backend in ("triton", "reference")
    )
    return None if torch.equal(found.topk_ids, expected.topk_ids) else "filled slots"


def time_kernel(rows: int, experts: int, spelling: str) -> dict[str, Any]:
    """Measure select() with a policy, and SGLang's router. Both times are in microseconds."""
    logits = _make_logits(rows, experts, torch.bfloat16)
    calls = {"us": make_call(rows, experts, spelling), "upstream_us": _make_upstream(logits)}
    runs = {name: partial(repeat, call, CALLS) for name, call in calls.items()}
    found = {name: median(times) for name, times in time_alternating(runs, ROUNDS, CALLS).items()}
    print(f"{spelling}, {rows} x {experts}: {found['us']:.2f} us", flush=True)
    return {"policy": spelling, "rows": rows, "experts": experts, **found}


def time_call(call: Callable[[], object]) -> float:
    """Measure the median time of a call in microseconds. The CUDA graph contains many calls."""
    return time_graph(partial(repeat, call, CALLS)) / CALLS


def make_call(rows: int, experts: int, spelling: str) -> Callable[[], object]:
    """Return a function that calls select() with the Triton kernel, as a layer does, on random logits in bf16."""
    plan, batch = parse_plan(spelling, rows), Batch(tokens_per_request=count_tokens(spelling, rows))
    logits, ranks = _make_logits(rows, experts, torch.bfloat16), _make_ranks(experts)
    return partial(select, logits, plan, Router(TOP_K), batch, ranks, "triton", slots=RunnerSlots())


def _make_upstream(logits: torch.Tensor) -> Callable[[], object]:
    # This is the router of a CUDA server from SGLang 0.5.17 on: a Triton kernel and a launch that zeroes its bias.
    router = import_module("sglang.srt.layers.moe.topk").fused_topk
    return partial(router, logits, logits, TOP_K, True)  # the router ignores the hidden states' values


def _make_logits(rows: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * experts)
    return (2 * torch.randn(rows, experts, generator=generator)).to(DEVICE, dtype)


def _make_ranks(experts: int) -> torch.Tensor:
    """Return the rank of each expert [experts]. Consecutive experts are on the same rank."""
    return torch.arange(experts, device=DEVICE) * RANKS // experts


def count_tokens(spelling: str, rows: int) -> int:
    """Return the number of tokens per request that a batch has for this policy."""
    return TOKENS_PER_REQUEST if parse_plan(spelling).add_per_request and rows % TOKENS_PER_REQUEST == 0 else 1


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of this experiment: the comparison of the ids, the times, the fastest shapes and the tests."""
    if "cases" in points:
        cases = points["cases"]
        yield check_row("ids against the reference, bit for bit", cases, f"{cases.get('equal')} cases equal")
    for one in [point for point in points.values() if "us" in point]:
        ratio = one["us"] / one["upstream_us"]
        text = f"{one['us']:.2f} us, upstream's router {one['upstream_us']:.2f} us: {ratio:.2f} x"
        if "upstream_later_us" in one:  # only in records from before 2026-11-28
            later = one["upstream_later_us"]
            text += f", from 0.5.20 on {later:.2f} us: {one['us'] / later:.2f} x"
        if "former_us" in one:  # only in the record of 2026-11-27
            text += f"; formerly {one['former_us']:.2f} us"
        what = f"{one['policy']}, {one['rows']} tokens x {one['experts']} experts"
        yield Row(what, text, f"at most {TIME_BAR:g} x", ratio <= TIME_BAR)
    yield from (Row("fastest shape", line) for line in describe(points))
    yield from (check_row(f"{path}, compiled", points[path]) for path in TESTS if path in points)
