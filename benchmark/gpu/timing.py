"""Measurements of GPU time with CUDA events around graph replays. They exclude host time and gaps between launches."""

from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from statistics import median

import torch

from benchmark.common.record import Record

WARM_UPS = 3
REPLAYS = 200
ROUNDS, ROUND_REPLAYS = 20, 20
COPY_BYTES = 1 << 30
is_dry = False
"""True if this process only compiles kernels. Then every function runs once, and every time is 1. See `run_dry`."""


def run_dry(measure: Callable[[], object]) -> None:
    """Run a measurement once without timing, to compile its kernels. Its output is suppressed."""
    global is_dry
    is_dry = True
    with redirect_stdout(StringIO()):
        measure()


def time_graph(run: Callable[[], object], replays: int = REPLAYS) -> float:
    """Measure the median time of `run` in microseconds, in a replayed CUDA graph."""
    if is_dry:
        run()
        return 1.0
    return time_calls(capture(run).replay, replays)


def time_alternating(
    runs: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, parts: int = 1
) -> dict[str, list[float]]:
    """Measure the median time of each run in microseconds, for each round.

    Each run is captured as a CUDA graph, and all graphs are replayed in every round. The order is reversed in every
    other round, so a drift of the clock does not favour a run. `parts` is the number of equal parts in a run. The times
    are divided by this number.
    """
    if is_dry:
        return {name: [time_graph(run)] for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    graphs = {name: capture(run) for name, run in runs.items()}
    for number in range(rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            times[name].append(time_calls(graphs[name].replay, ROUND_REPLAYS) / parts)
    return times


def repeat(call: Callable[[], object], times: int) -> None:
    """Call a function several times. In a graph with many calls, the launch of the graph takes little of the time."""
    for _ in range(1 if is_dry else times):
        call()


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture `run` as a CUDA graph. Some calls before the capture compile the kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_calls(call: Callable[[], object], repeats: int) -> float:
    """Measure the median GPU time of `repeats` calls in microseconds, after a few warm-up calls."""
    for _ in range(WARM_UPS):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return 1000 * median(begin.elapsed_time(end) for begin, end in events)


def measure_copy(record: Record) -> None:
    """Measure and record the bandwidth of a device-to-device copy in GB/s.

    The copy is much larger than the caches. Both the read and the written bytes count.
    """
    if "copy" not in record:
        source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        us = time_calls(lambda: target.copy_(source), repeats=20)
        record.add("copy", gb_per_s=2 * COPY_BYTES / us / 1000)
