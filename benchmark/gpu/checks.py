"""Points and checks of the run on a GPU: a failure is kept with its reason, and everything else continues."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmark.common.paths import ROOT
from benchmark.common.record import Record

FAILED = "failed "
"""Precedes the key of a point that could not be measured."""
WORKERS = min(len(os.sched_getaffinity(0)), 32)
"""Processes side by side: each compiles kernels, which takes seconds of a core, and has a CUDA context."""


def choose_parts(experiment: str, parts: Sequence[str], allowed: Iterable[str]) -> list[str]:
    """Return the requested parts, or all. Raises ValueError for a part that the experiment does not have."""
    allowed = list(allowed)
    for part in parts:
        if part not in allowed:
            names = f"one of {', '.join(allowed)}" if allowed else "left out"
            raise ValueError(f"the part of experiment {experiment} must be {names} (got {part})")
    return list(parts) or allowed


def check(record: Record, key: str, run: Callable[[], Mapping[str, Any] | None]) -> str | None:
    """Run a check, unless it is recorded as passed, and record its result. A result with a `reason` is a failure.

    Returns the reason of a failure.
    """
    if is_passed(record.points, key):
        return None
    try:
        found = run() or {}
    except Exception as error:  # kernels that do not compile, load or launch raise any class of error
        found = {"reason": explain(error)}
    reason = found.get("reason")
    record.add(key, passed=reason is None, **found)
    return reason and _report(key, reason)


def measure_points(record: Record, calls: Mapping[str, Callable[[], Mapping[str, Any]]]) -> str | None:
    """Measure every point that the record lacks; points that failed before come last.

    A failure is recorded under `FAILED` and stops no other point. Returns the first failure. Raises CUDA's error if a
    failure has broken the device: every later point would fail for a reason that is not its own.
    """
    first = None
    for key in sorted((key for key in calls if key not in record), key=lambda key: FAILED + key in record):
        try:
            record.add(key, **calls[key]())
        except Exception as error:
            record.add(FAILED + key, reason=explain(error))
            first = first or f"{key}: {_report(key, explain(error))}"
            import torch

            if torch.cuda.is_available():
                torch.cuda.synchronize()
    return first


def _report(key: str, reason: str) -> str:
    print(f"{key}: {reason}", file=sys.stderr, flush=True)
    return reason


def explain(error: Exception) -> str:
    """Return the error's message, or its class if it has none, in one line."""
    return shorten(str(error) or type(error).__name__)


def shorten(text: str) -> str:
    """Return the first line of a text, at most 300 characters."""
    return text.strip().partition("\n")[0][:300]


def is_passed(points: Mapping[str, Any], key: str) -> bool:
    """Return whether a check is recorded as passed."""
    return bool(points.get(key, {}).get("passed"))


def run_tests(path: str, options: Sequence[str] = ()) -> None:
    """Run a file's tests that pytest's `options` choose, long tests included. Raises RuntimeError if one fails."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "-n", str(WORKERS)]
    done = subprocess.run([*pytest, *options, path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    if done.returncode != 0:
        failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
        what = f"{len(failed)} tests failed on this GPU, first {failed[0]}" if failed else f"status {done.returncode}"
        raise RuntimeError(f"{path}: {what}")
