"""Checks of the run on a GPU: kept with their reason when they fail, so that what does not depend on them goes on."""

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
"""Processes side by side: a kernel of some 550 takes 1 to 9 s of a core (Triton 3.6.0), each a CUDA context."""


def choose_parts(experiment: str, parts: Sequence[str], allowed: Iterable[str] = ()) -> list[str]:
    """The parts asked for, or all. Raises ValueError for one that the experiment has not."""
    allowed = list(allowed)
    for part in parts:
        if part not in allowed:
            raise ValueError(f"part {part}: allowed in experiment {experiment} is {', '.join(allowed) or 'none'}")
    return list(parts) or allowed


def check(record: Record, key: str, run: Callable[[], Mapping[str, Any] | None]) -> str | None:
    """Run a check; keep, and return, why it failed or what it found. One that finds a `reason` has failed."""
    try:
        found = run() or {}
    except Exception as error:  # kernels that do not compile, load or launch raise what they like
        found = {"reason": explain(error)}
    reason = found.get("reason")
    record.add(key, passed=reason is None, **found)
    if reason is not None:
        print(f"{key}: {reason}", file=sys.stderr, flush=True)
    return reason


def measure_points(record: Record, calls: Mapping[str, Callable[[], Mapping[str, Any]]]) -> str | None:
    """Measure every point that the record lacks, those that have failed before last. One that fails costs no other: its
    reason is kept under `FAILED`, and the first is returned.

    Raises what CUDA says where a failure has cost the process its device: whoever comes next would fail for no reason
    of its own.
    """
    first = None
    for key in sorted((key for key in calls if key not in record), key=lambda key: FAILED + key in record):
        try:
            record.add(key, **calls[key]())
        except Exception as error:
            reason = explain(error)
            record.add(FAILED + key, reason=reason)
            print(f"{key}: {reason}", file=sys.stderr, flush=True)
            first = first or f"{key}: {reason}"
            _check_device()
    return first


def _check_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def explain(error: Exception) -> str:
    """What it says, else what it is."""
    return shorten(str(error) or type(error).__name__)


def shorten(text: str) -> str:
    """The first line of it, 300 characters at most."""
    return text.strip().partition("\n")[0][:300]


def is_passed(points: Mapping[str, Any], key: str) -> bool:
    """Whether that check is recorded, and passed."""
    return bool(points.get(key, {}).get("passed"))


def run_tests(paths: Sequence[str], options: Sequence[str] = ()) -> None:
    """Run the tests of these files that pytest's `options` choose, side by side. Raises RuntimeError if one fails."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]  # the long tests too
    listed = subprocess.run([*pytest, "--collect-only", *options, *paths], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    tests = [line for line in listed.stdout.splitlines() if "::" in line]
    if listed.returncode != 0 or not tests:
        raise RuntimeError(f"{' '.join(paths)}: the tests could not be collected:\n{listed.stdout}")
    running = [
        subprocess.Popen([*pytest, *tests[i::WORKERS]], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for i in range(min(WORKERS, len(tests)))
    ]
    outputs = [(process.communicate()[0], process.returncode) for process in running]
    failed = [output for output, status in outputs if status != 0]
    print("".join(failed) or f"{len(tests)} tests passed, or were skipped", flush=True)
    if failed:
        names = [line.split()[1] for output in failed for line in output.splitlines() if line.startswith("FAILED ")]
        first = f", first {names[0]}" if names else ""
        raise RuntimeError(f"{' '.join(paths)}: {len(names) or 'some'} of {len(tests)} tests failed on this GPU{first}")
