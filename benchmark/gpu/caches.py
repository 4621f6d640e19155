"""The experiment `caches`, which compiles the kernels of later experiments on many cores and measures nothing.

Otherwise, each later experiment would compile dozens of kernels one after another. On a machine with an H200 and 16
cores, 39 compilation jobs took 68 s while the checks were running.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from time import monotonic
from typing import Any

from benchmark.common.record import Record
from benchmark.common.variant import parse_plan
from benchmark.gpu import compilation, launch, levers, moe_layer, routing
from benchmark.gpu.checks import WORKERS, explain
from benchmark.gpu.layer import BANDWIDTH_AT, time_policies
from benchmark.gpu.server import POLICY
from benchmark.gpu.table import Row
from benchmark.gpu.timing import run_dry

PARTS = ()
MODEL = "qwen3-30b-a3b"
SERVED_ROWS = (1, 2, 4, 8, 16, 24, 32)
"""The captured batch sizes for which SGLang has different launch configurations."""
CHUNK = 4
"""The number of fused MoE launches that one job compiles. Each job needs the weights of a layer, which have 1.2 GB."""
KEY = "compiled"


def measure(record: Record, parts: Sequence[str]) -> None:
    """Compile all kernels and record the failures. A failed kernel is compiled again when it is measured.

    The jobs use only half of the cores. Every process holds the weights of a layer in GPU memory, and the first server
    also needs GPU memory at the same time.
    """
    began, jobs, failed = monotonic(), list_jobs(), []
    with ProcessPoolExecutor(max(1, WORKERS // 2), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_try, job) for job in jobs]):
            if reason := done.result():
                failed.append(reason)
                print(f"caches: {reason}", flush=True)
    record.add(KEY, jobs=len(jobs), failed=failed, seconds=monotonic() - began)


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row with the number of compiled jobs."""
    if KEY in points:
        jobs, failed = points[KEY]["jobs"], points[KEY]["failed"]
        first = f", the first that failed: {failed[0]}" if failed else ""
        done = f"{jobs - len(failed)} of {jobs} jobs in {points[KEY]['seconds']:.0f} s{first}"
        yield Row("compiled beforehand", done)


def list_jobs() -> list[Callable[[], object]]:
    """Return the jobs, with the longest first. Every job can be pickled for another process."""
    launches = launch.list_few()
    return [
        *(partial(time_policies, MODEL, [policy]) for policy in levers.POLICIES),
        *levers.list_points(["fixed"]).values(),
        *(partial(run_launches, launches[first : first + CHUNK]) for first in range(0, len(launches), CHUNK)),
        *(partial(run_served, rows) for rows in SERVED_ROWS),
        *routing.list_points(["128"]).values(),
    ]


def run_launches(launches: Sequence[Mapping[str, int]]) -> None:
    """Run a layer with each of these launch configurations of the fused MoE."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config

    layers = moe_layer.make_layers(MODEL)
    route = moe_layer.fixed_router(moe_layer.route_to(BANDWIDTH_AT, layers.shape, moe_layer.ROWS, "cuda"))
    for one in launches:
        # No exception may leave this block, because SGLang would then keep the override.
        with override_config(one), suppress(Exception):
            layers.run(route)


def run_served(rows: int) -> None:
    """Run the kernels that a server of Qwen3-30B-A3B captures for this batch size: the fused MoE and the selection."""
    layers = moe_layer.make_layers(MODEL, rows)
    layers.run(moe_layer.fixed_router(moe_layer.route_to(layers.shape.top_k, layers.shape, rows, "cuda")))
    if rows > 1:
        compilation.run_steps(layers.shape.experts, "cuda", parse_plan(POLICY), rows)


def _try(job: Callable[[], object]) -> str | None:
    """Run a job without timing. Return a description of the failure, or None after success."""
    try:
        run_dry(job)
    except Exception as error:  # a kernel that does not compile or launch can raise any type of exception
        return f"{getattr(job, 'args', job)}: {explain(error)}"
    return None
