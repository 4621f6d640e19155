"""Points and checks of the GPU run. A failure is recorded with its reason and does not stop other measurements."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmark.common.paths import ROOT
from benchmark.common.record import Record

FAILED = "failed "
"""The prefix of the key of a point that could not be measured."""
WORKERS = min(len(os.sched_getaffinity(0)), 32)
"""The maximum number of parallel processes. Each one has a CUDA context and compiles kernels on one core."""


def choose_parts(experiment: str, parts: Sequence[str], allowed: Iterable[str]) -> list[str]:
    """Return the requested parts, or all parts by default. Raises ValueError if a part does not exist."""
    allowed = list(allowed)
    for part in parts:
        if part not in allowed:
            names = f"one of {', '.join(allowed)}" if allowed else "left out"
            raise ValueError(f"the part of experiment {experiment} must be {names} (got {part})")
    return list(parts) or allowed


def check(record: Record, key: str, run: Callable[[], Mapping[str, Any] | None]) -> str | None:
    """Run a check and record its result, unless the check has already passed.

    A result that contains a `reason` is a failure. Return the reason of a failure, or None.
    """
    if is_passed(record.points, key):
        return None
    try:
        found = run() or {}
    except Exception as error:  # kernels that do not compile, load or launch can raise any type of exception
        found = {"reason": explain(error)}
    reason = found.get("reason")
    record.add(key, passed=reason is None, **found)
    return reason and _report(key, reason)


def measure_points(record: Record, calls: Mapping[str, Callable[[], Mapping[str, Any]]]) -> str | None:
    """Measure all points that are missing in the record. Points that failed in an earlier run come last.

    A failure is recorded with the prefix `FAILED`, and the other points continue. Return the first failure, or None.
    Raises CUDA's error if a failure has broken the device, because all later points would fail too.
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
    """Return the message of an error as one line, or the name of its class if the message is empty."""
    return shorten(str(error) or type(error).__name__)


def shorten(text: str) -> str:
    """Return the first line of a text, cut to 300 characters."""
    return text.strip().partition("\n")[0][:300]


def is_passed(points: Mapping[str, Any], key: str) -> bool:
    """Return whether the record says that a check has passed."""
    return bool(points.get(key, {}).get("passed"))


def run_tests(path: str, options: Sequence[str] = ()) -> None:
    """Run the tests of a file that pytest's `options` choose, with long tests. Raises RuntimeError if a test fails."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "-n", str(WORKERS)]
    done = subprocess.run([*pytest, *options, path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    if done.returncode != 0:
        failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
        what = f"{len(failed)} tests failed on this GPU, first {failed[0]}" if failed else f"status {done.returncode}"
        raise RuntimeError(f"{path}: {what}")
