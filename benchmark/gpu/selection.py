"""Stage `selection`: the kernels against the reference on this device, then their time beside upstream's own router."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmark.common.paths import ROOT
from benchmark.gpu.record import Record
from benchmark.gpu.table import Row

KERNELS = "benchmark.kernels.gpu_selection"
TESTS = ("test/selection/test_triton.py", "test/selection/test_slots.py", "test/stage/test_mask.py")
WORKERS = 8
"""Processes that test. Some 400 tests compile a kernel each: 1 to 9 s of a core, with Triton 3.6.0 on an EPYC."""
TIME_BAR = 2.0  # times upstream's fused router on the same logits; ours does both
FIELDS = {"policy", "rows", "experts", "us", "upstream_us", "sorted_us", "upstream_sorted_us"}


def measure(record: Record, models: Sequence[str]) -> None:
    """Run the tests of the kernels compiled for this device, then their benchmark."""
    if models:
        raise ValueError(f"models {' '.join(models)}: stage selection knows no models; allowed is none")
    if "tests" not in record:
        run_tests(TESTS)
        record.add("tests", passed=True)
    if "kernels" not in record:
        with TemporaryDirectory() as folder:
            out = Path(folder, "times.json")
            _run("-m", KERNELS, "--out", str(out))
            record.add("kernels", **read_times(out))


def rows(points: Mapping[str, Any]) -> list[Row]:
    """Exactness, and every time as a multiple of upstream's."""
    found = [Row("tests of the Triton kernel, compiled", "passed", "passed", True)] if "tests" in points else []
    if "kernels" in points:
        cases = points["kernels"]["cases"]
        found.append(Row("ids against the reference", f"{cases} cases equal", "bit for bit", True))
        times = points["kernels"]["times"]
        found += [_time_row(one) for one in times] + [_sorted_row(one) for one in times]
    return found


def read_times(path: Path) -> dict[str, Any]:
    """What the kernels' benchmark wrote: `cases`, how many inputs gave the reference's ids, and `times`, a list of
    objects with FIELDS. Raises ValueError where it is something else.
    """
    content = json.loads(path.read_text())
    times = content.get("times", [])
    if "cases" not in content or not times or not all(one.keys() >= FIELDS for one in times):
        needed = f"cases and times with {', '.join(sorted(FIELDS))}"
        raise ValueError(f"{KERNELS} wrote {', '.join(content)}; needed is {needed}")
    return content


def run_tests(paths: Sequence[str]) -> None:
    """Run the tests of these files side by side, all but those of upstream. Raises RuntimeError where one fails."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    listed = subprocess.run(
        [*pytest, "--collect-only", "-k", "not upstream", *paths], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    tests = [line for line in listed.stdout.splitlines() if "::" in line]
    if listed.returncode != 0 or not tests:
        raise RuntimeError(f"{' '.join(paths)}: the tests could not be collected:\n{listed.stdout}")
    running = [
        subprocess.Popen([*pytest, *tests[i::WORKERS]], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for i in range(min(WORKERS, len(tests)))
    ]
    outputs = [(process.communicate()[0], process.returncode) for process in running]
    failed = [output for output, status in outputs if status != 0]
    print("".join(failed) or f"{len(tests)} tests of the kernels passed, or were skipped", flush=True)
    if failed:
        raise RuntimeError("tests of the kernels failed on this GPU; their output is above")


def _time_row(one: Mapping[str, Any]) -> Row:
    ratio = one["us"] / one["upstream_us"]
    what = f"{one['policy']}, {one['rows']} tokens x {one['experts']} experts"
    text = f"{one['us']:.2f} us, upstream's router {one['upstream_us']:.2f} us: {ratio:.2f} x"
    return Row(what, text, f"at most {TIME_BAR:g} x", ratio <= TIME_BAR)


def _sorted_row(one: Mapping[str, Any]) -> Row:
    what = f"{one['policy']}, {one['rows']} tokens x {one['experts']} experts, slots sorted"
    theirs = one["upstream_sorted_us"]
    return Row(what, f"{one['sorted_us']:.2f} us, upstream's router and sorting {theirs:.2f} us")


def _run(*args: str) -> None:
    if subprocess.run([sys.executable, *args], cwd=ROOT).returncode != 0:
        raise RuntimeError(f"{' '.join(args)}: failed on this GPU; its output is above")
