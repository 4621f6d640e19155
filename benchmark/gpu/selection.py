"""Experiment `selection`: the kernels against the reference on this device, and their time beside upstream's router."""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from benchmark.common.paths import ROOT
from benchmark.common.record import Record
from benchmark.gpu.table import Row

TESTS = ("test/selection/test_triton.py", "test/selection/test_slots.py", "test/stage/test_mask.py")
WORKERS = 8
"""Processes that test. Some 400 tests compile a kernel each: 1 to 9 s of a core, with Triton 3.6.0 on an EPYC."""
TIME_BAR = 2.0  # times upstream's fused router on the same logits; ours does both


def measure(record: Record, models: Sequence[str]) -> None:
    """Run the tests of the kernels compiled for this device, hold their ids to the reference's, and time them."""
    if models:
        raise ValueError(f"models {' '.join(models)}: experiment selection knows no models; allowed is none")
    from benchmark.gpu import kernels

    if "tests" not in record:
        run_tests(TESTS)
        record.add("tests", passed=True)
    shapes = list(product(kernels.TIMED_ROWS, kernels.TIMED_EXPERTS, kernels.PLANS))
    if "cases" not in record:
        cases = kernels.make_cases(kernels.PLANS)
        if (difference := kernels.check_all(cases, shapes)) is not None:
            raise RuntimeError(difference)
        record.add("cases", equal=len(cases))
    for rows, experts, policy in shapes:
        key = f"{policy}/{rows}x{experts}"
        if key not in record:
            record.add(key, **asdict(kernels.measure(rows, experts, policy)))
            print(f"{key}: {record.points[key]['us']:.2f} us", flush=True)


def rows(points: Mapping[str, Any]) -> list[Row]:
    """Exactness, and every time as a multiple of upstream's."""
    found = [Row("tests of the Triton kernel, compiled", "passed", "passed", True)] if "tests" in points else []
    if "cases" in points:
        found.append(Row("ids against the reference", f"{points['cases']['equal']} cases equal", "bit for bit", True))
    return [*found, *_time_rows([point for point in points.values() if "us" in point])]


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


def _time_rows(times: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for one in times:
        ratio = one["us"] / one["upstream_us"]
        text = f"{one['us']:.2f} us, upstream's router {one['upstream_us']:.2f} us: {ratio:.2f} x"
        yield Row(_describe(one), text, f"at most {TIME_BAR:g} x", ratio <= TIME_BAR)
    for one in times:
        text = f"{one['sorted_us']:.2f} us, upstream's router and sorting {one['upstream_sorted_us']:.2f} us"
        yield Row(f"{_describe(one)}, slots sorted", text)


def _describe(one: Mapping[str, Any]) -> str:
    return f"{one['policy']}, {one['rows']} tokens x {one['experts']} experts"
