"""Experiment `caches`: compilation, on many cores, of what the timed tasks launch, without any timing.

A kernel takes 1 to 9 s of a core, and a timed task would compile dozens one after another. It runs beside the checks.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from time import monotonic
from typing import Any

from benchmark.common.record import Record
from benchmark.common.variant import parse_plan
from benchmark.gpu import levers, routing, server
from benchmark.gpu.checks import WORKERS, choose_parts, explain
from benchmark.gpu.layer import BANDWIDTH_AT, ROWS, SHAPES
from benchmark.gpu.table import Row

MODEL = "qwen3-30b-a3b"
SERVED_ROWS = (1, 2, 4, 8, 16, 24, 32)
"""Captured batch sizes of a server for which upstream has launches of their own."""
CHUNK = 4
"""Launches of the fused MoE that one job compiles: each job draws a layer's weights, 1.2 GB."""
KEY = "compiled"


def measure(record: Record, parts: Sequence[str]) -> None:
    """Compile everything and keep what failed, which is compiled again when it is timed.

    Half of the cores, because each process holds the weights of a layer beside the first server.
    """
    choose_parts("caches", parts)
    began, jobs, failed = monotonic(), list_jobs(), []
    with ProcessPoolExecutor(max(1, WORKERS // 2), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_try, job) for job in jobs]):
            if reason := done.result():
                failed.append(reason)
                print(f"caches: {reason}", flush=True)
    record.add(KEY, jobs=len(jobs), failed=failed, seconds=monotonic() - began)


def rows(points: Mapping[str, Any]) -> list[Row]:
    """Return how much was compiled."""
    if KEY not in points:
        return []
    jobs, failed = points[KEY]["jobs"], points[KEY]["failed"]
    first = f", the first that failed: {failed[0]}" if failed else ""
    return [Row("compiled beforehand", f"{jobs - len(failed)} of {jobs} jobs in {points[KEY]['seconds']:.0f} s{first}")]


def list_jobs() -> list[Callable[[], None]]:
    """Return the jobs, the longest first; each can be sent to another process."""
    from benchmark.gpu import launch

    launches = launch.list_few()
    return [
        *(partial(run_policy, policy, prebuilt) for policy in levers.POLICIES for prebuilt in (False, True)),
        *(partial(run_launches, launches[first : first + CHUNK]) for first in range(0, len(launches), CHUNK)),
        *(partial(run_served, rows) for rows in SERVED_ROWS),
        *(partial(routing.compile_point, 128, rows, policy) for rows in routing.ROWS for policy in routing.POLICIES),
    ]


def run_policy(policy: str, prebuilt: bool) -> None:
    """Run a layer under a policy, with the alignment handed over or without, as experiment `levers` does."""
    shape, layers = _make_layer(ROWS)
    levers.run_once(shape, layers, policy, prebuilt)


def run_launches(launches: Sequence[Mapping[str, int]]) -> None:
    """Run a layer with each of these launches of the fused MoE."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config

    from benchmark.gpu import moe_layer

    shape, layers = _make_layer(ROWS)
    route = moe_layer.fixed_router(moe_layer.route_to(BANDWIDTH_AT, shape, ROWS, "cuda"))
    for one in launches:
        # No exception may leave this block: upstream would go on with the override.
        with override_config(one), suppress(Exception):
            layers.run(route)


def run_served(rows: int) -> None:
    """Run what a server of Qwen3-30B-A3B captures for these rows: the fused MoE, and a counted selection."""
    from benchmark.gpu import compilation, moe_layer

    shape, layers = _make_layer(rows)
    layers.run(moe_layer.fixed_router(moe_layer.route_to(shape.top_k, shape, rows, "cuda")))
    if rows > 1:
        compilation.run_steps(shape.experts, "cuda", parse_plan(server.POLICY), rows)


def _make_layer(rows: int) -> Any:
    """Return (shape, one layer of it)."""
    from benchmark.gpu import moe_layer

    shape = moe_layer.Shape(MODEL, **SHAPES[MODEL] | {"layers": 1})
    return shape, moe_layer.MoeLayers(shape, rows)


def _try(job: Callable[[], None]) -> str | None:
    """Run a job. Return what failed, None if nothing did."""
    try:
        job()
    except Exception as error:  # a kernel that does not compile or launch raises what it likes
        return f"{getattr(job, 'func', job)}: {explain(error)}"
    return None
