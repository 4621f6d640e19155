"""A task of the run in a process of its own: watched, stopped with all it started when its time is over."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Timer
from time import monotonic

from benchmark.common.paths import ROOT
from benchmark.common.server import die_with_parent
from benchmark.gpu.checks import shorten

GRACE = 10.0  # seconds in which a stopped task may stop its servers


@dataclass(frozen=True)
class Ended:
    """How it ended. `status`: None where its time was over; `reason`: what it said last, if it failed."""

    status: int | None
    reason: str
    seconds: float


def run_process(arguments: Iterable[str], limit: float, env: Mapping[str, str]) -> Ended:
    """Run Python with these arguments and show what it prints, for `limit` seconds at most."""
    began = monotonic()
    process = subprocess.Popen(
        [sys.executable, "-u", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    stopped: list[bool] = []

    def stop() -> None:
        stopped.append(True)
        _signal(process, signal.SIGTERM)

    timers = [Timer(limit, stop), Timer(limit + GRACE, _signal, (process, signal.SIGKILL))]
    for timer in timers:
        timer.start()
    said = last = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if line.strip() else last
            said = line if line.startswith("gpu: ") else said
        status = process.wait()
    finally:
        for timer in timers:
            timer.cancel()
        _signal(process, signal.SIGKILL)  # what it left behind, and itself if we were interrupted
        process.wait()
    seconds = monotonic() - began
    if stopped and status != 0:
        return Ended(None, "", seconds)
    return Ended(
        status, "" if status == 0 else shorten(said.removeprefix("gpu: ") or last or f"status {status}"), seconds
    )


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """To all of its session's group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
