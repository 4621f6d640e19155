"""Checks of the run on a GPU: kept with their reason when they fail, so that what does not depend on them goes on."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmark.common.paths import ROOT
from benchmark.common.record import Record

WORKERS = 8
"""Processes that test. Some 400 tests compile a kernel each: 1 to 9 s of a core, with Triton 3.6.0 on an EPYC."""


def check(record: Record, key: str, run: Callable[[], Mapping[str, Any] | None]) -> str | None:
    """Run a check and keep that it passed and what it found, or why it failed: the reason is returned as well."""
    try:
        found = run()
    except Exception as error:  # kernels that do not compile, load or launch raise what they like
        reason = shorten(str(error) or type(error).__name__)
        record.add(key, passed=False, reason=reason)
        print(f"{key}: {reason}", file=sys.stderr, flush=True)
        return reason
    record.add(key, passed=True, **(found or {}))
    return None


def shorten(text: str) -> str:
    """The first line of it, 300 characters at most."""
    return text.strip().partition("\n")[0][:300]


def is_passed(points: Mapping[str, Any], key: str) -> bool:
    """Whether that check is recorded, and passed."""
    return bool(points.get(key, {}).get("passed"))


def run_tests(paths: Sequence[str], options: Sequence[str] = ()) -> None:
    """Run the tests of these files that pytest's `options` choose, side by side. Raises RuntimeError if one fails."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
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
