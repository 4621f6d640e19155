"""An experiment of `make gpu` on the GPU that is not there, or `run` for all of them, with few rounds of short answers:
how far it comes, not what it measures.

    python -m fake_gpu.walk layer qwen3-30b-a3b --out FOLDER
"""

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmark.common.command import one_line_errors
from benchmark.gpu import __main__, replay, run, serving
from fake_gpu.server import ONE_POOL
from sglang_xshare.selection.triton_kernel import tile

SECONDS = 1200.0  # of a server's start on a busy machine
NOT_HERE = ("upstream", "selection")
"""Checks of what kernels compute."""


def shorten() -> None:
    """Two rounds of eight tokens."""
    serving.OUTPUT_TOKENS = 8
    serving.START_LIMIT = SECONDS
    serving.ROUNDS = 2
    serving.RUNNER_ARGS["gpt-oss"] += ONE_POOL
    # Kernels count nothing here.
    read = replay.read_settled_totals
    replay.read_settled_totals = lambda server: {name: total + 1.0 for name, total in read(server).items()}
    # What was timed here is not for the kernel.
    shapes = Path(tempfile.mkdtemp()) / tile.SHAPES_FILE.name
    tile.SHAPES_FILE = Path(shutil.copy(tile.SHAPES_FILE, shapes))


def leave_out() -> None:
    """What this device cannot pass: these checks, and tasks that are tests. Tasks are walked as this process is."""
    run.MODULE = "fake_gpu.walk"
    for name in NOT_HERE:
        del run.CHECKS[name]
    run.TASKS = tuple(
        replace(task, needs=tuple(name for name in task.needs if name not in NOT_HERE))
        for task in run.TASKS
        if task.needs or task.parts == ("shapes",)
    )


if __name__ == "__main__":
    shorten()
    leave_out()
    sys.argv[0] = "benchmark.gpu"
    with one_line_errors("gpu"):
        sys.exit(__main__.main())
