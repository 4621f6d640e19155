"""Experiment `selection`: the kernels against the reference on this device, and their time beside upstream's router.

Part `ids` holds ids to the reference's and compiles what part `times` times; part `shapes` times how batches can be cut
into programs and has the kernel use the fastest; part `tests` runs the kernels' own tests, which compile for minutes.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from benchmark.common.record import Record
from benchmark.gpu.checks import check, choose_parts, is_passed, measure_points, run_tests
from benchmark.gpu.shapes import describe, measure_shapes
from benchmark.gpu.table import Row, check_row

PARTS = ("ids", "times", "shapes", "tests")
TESTS = (
    "test/selection/test_triton.py",
    "test/selection/test_backends.py",
    "test/selection/test_alignment.py",
    "test/stage/test_mask.py",
)
NOT_UPSTREAM = ("-k", "not upstream")  # what upstream's kernels do is no question here
SHOWN = 10  # differences that are kept
TIME_BAR = 2.0  # times upstream's fused router on the same logits; ours does both


def measure(record: Record, parts: Sequence[str]) -> None:
    """Measure what the record lacks. What fails is recorded, does not stop the rest, and is raised at the end."""
    parts = choose_parts("selection", parts, PARTS)
    failed: list[str | None] = []
    if "ids" in parts and not is_passed(record.points, "cases"):
        failed.append(check(record, "cases", _hold_to_reference))
    if "times" in parts:
        failed.append(_measure_times(record))
    if "shapes" in parts:
        failed.append(measure_shapes(record))
    if "tests" in parts:
        missing = [path for path in TESTS if not is_passed(record.points, path)]
        failed += [check(record, path, partial(run_tests, [path], NOT_UPSTREAM)) for path in missing]
    for reason in filter(None, failed):
        raise RuntimeError(reason)


def rows(points: Mapping[str, Any]) -> list[Row]:
    """Exactness, and every time as a multiple of upstream's."""
    found = []
    if "cases" in points:
        cases = points["cases"]
        found.append(check_row("ids against the reference, bit for bit", cases, f"{cases.get('equal')} cases equal"))
    found += _time_rows([point for point in points.values() if "us" in point])
    found += [Row("fastest shape", line) for line in describe(points)]
    tests = [path for path in points if path.startswith("test/")]  # of an older record, files that have gone since, too
    return [*found, *(check_row(f"{path}, compiled", points[path]) for path in tests)]


def _hold_to_reference() -> dict[str, Any]:
    from benchmark.gpu import kernels

    cases = kernels.make_cases(kernels.PLANS)
    if differences := kernels.check_all(cases, _list_timed()):
        reason = f"{len(differences)} of {len(cases)} cases differ, the first: {differences[0]}"
        return {"reason": reason, "differences": differences[:SHOWN]}
    return {"equal": len(cases)}


def _measure_times(record: Record) -> str | None:
    """Return why the first time could not be taken, if one could not."""
    from benchmark.gpu import kernels

    def time(key: str, shape: tuple[int, int, str]) -> dict[str, Any]:
        found = kernels.measure(*shape)
        print(f"{key}: {found['us']:.2f} us", flush=True)
        return found

    shapes = {f"{policy}/{rows}x{experts}": (rows, experts, policy) for rows, experts, policy in _list_timed()}
    return measure_points(record, {key: partial(time, key, shape) for key, shape in shapes.items()})


def _list_timed() -> list[tuple[int, int, str]]:
    """Return (rows, experts, policy) of every time."""
    from benchmark.gpu import kernels

    return list(product(kernels.TIMED_ROWS, kernels.TIMED_EXPERTS, kernels.PLANS))


def _time_rows(times: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for one in times:
        ratio = one["us"] / one["upstream_us"]
        text = f"{one['us']:.2f} us, upstream's router {one['upstream_us']:.2f} us: {ratio:.2f} x"
        if "upstream_later_us" in one:
            later = one["upstream_later_us"]
            text += f", from 0.5.20 on {later:.2f} us: {one['us'] / later:.2f} x"
        if "former_us" in one:
            text += f"; formerly {one['former_us']:.2f} us"
        what = f"{one['policy']}, {one['rows']} tokens x {one['experts']} experts"
        yield Row(what, text, f"at most {TIME_BAR:g} x", ratio <= TIME_BAR)
