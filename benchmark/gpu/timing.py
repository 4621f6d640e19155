"""Times of device work, by events around replays of a CUDA graph: launch gaps and host time stay out of them."""

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
"""True in a process that only compiles: everything runs once, and every time is 1. See `run_dry`."""


def run_dry(measure: Callable[[], object]) -> None:
    """Run a measurement once without timing, which compiles its kernels; nothing is printed."""
    global is_dry
    is_dry = True
    with redirect_stdout(StringIO()):
        measure()


def time_graph(run: Callable[[], object], replays: int = REPLAYS) -> float:
    """Return the median microseconds of `run` in a replayed CUDA graph."""
    if is_dry:
        run()
        return 1.0
    return time_calls(capture(run).replay, replays)


def time_alternating(
    runs: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, parts: int = 1
) -> dict[str, list[float]]:
    """Return the median microseconds of one of the `parts` equal parts of each run, by round.

    Each run is a CUDA graph, and all are replayed in every round. Every other round goes in reverse order, so a drift
    of the clock favours no run.
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
    """Call `call` several times: in a graph of many calls, the graph's own launch is a small part."""
    for _ in range(1 if is_dry else times):
        call()


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of `run`; calls before the capture compile the kernels."""
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
    """Return the median microseconds on the device of `repeats` calls, after a few that are not counted."""
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
    """Record the GB/s of a device-to-device copy much larger than the caches, bytes read and written both counted."""
    if "copy" not in record:
        source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        us = time_calls(lambda: target.copy_(source), repeats=20)
        record.add("copy", gb_per_s=2 * COPY_BYTES / us / 1000)
