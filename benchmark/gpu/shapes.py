"""Measurements of launch shapes for the selection kernel. The fastest shapes are written to the file the kernel reads.

One program computes a small batch, and several programs share a large batch. For each number of experts, the file
contains two kinds of shapes. If there is one program, the shape is its number of warps, which depends on the number of
rows. If there are several programs, the shape is the number of rows and warps of each program. A single program is used
up to the largest number of rows at which it is faster.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from benchmark.common.record import Record, last_session, read_record
from benchmark.gpu.checks import FAILED, WORKERS, measure_points
from sglang_xshare.selection.triton_kernel import tile

EXPERTS = (32, 64, 128, 256, 512)
ONE_ROWS = (8, 16, 32, 64)
NOISE = 0.02
"""One program must be faster than several programs by this share, because several programs need fewer registers."""
MOST_SCORES = 8192  # more scores do not fit into the registers of one program
SEVERAL = tuple(product((8, 16), (4, 8)))
"""The tried (rows, warps) of each program if several programs share a batch."""
MANY_ROWS = 128
"""The batch size that decides which shape of several programs is the fastest, in rows."""
PLAN = "xshare"


@dataclass(frozen=True)
class Trial:
    """A launch shape to measure. It divides a batch of `rows` rows into programs of `tile` rows and `warps` warps."""

    experts: int
    rows: int
    tile: int
    warps: int

    @property
    def key(self) -> str:
        """Return the key of the trial in the record."""
        programs = f"programs of {self.tile}, {self.warps} warps"
        return f"shape of {PLAN}: {self.experts} experts, {self.rows} rows in {programs}"


def list_trials() -> Iterator[Trial]:
    """Yield all trials.

    For each number of experts, trials with one program come first. They have half or a quarter as many warps as rows.
    Then follow trials with several programs.
    """
    for experts in EXPERTS:
        ones = [rows for rows in ONE_ROWS if rows * experts <= MOST_SCORES]
        for rows in ones:
            yield from (Trial(experts, rows, rows, warps) for warps in (rows // 4, rows // 2))
        for rows in [*ones[1:], MANY_ROWS]:
            for size, warps in SEVERAL:
                if size < rows and size * experts <= MOST_SCORES:
                    yield Trial(experts, rows, size, warps)


def measure_shapes(record: Record) -> str | None:
    """Measure all missing trials in CUDA graphs, and write the fastest shapes. Return the first failure, or None."""
    missing = [trial for trial in list_trials() if trial.key not in record]
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:  # compiling takes most of the time
        for trial in missing:
            pool.submit(_run_trial, trial)  # a failure is reported when the trial is timed
    failure = measure_points(record, {trial.key: partial(_time_trial, trial) for trial in missing})
    _write_content(record.content)
    return failure


def choose(points: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fastest shape for every number of experts with complete trials, in the format of `shapes.json`."""
    by_experts = {experts: [trial for trial in list_trials() if trial.experts == experts] for experts in EXPERTS}
    return [
        _choose_shape(experts, {trial: points[trial.key]["trial_us"] for trial in trials if trial.key in points})
        for experts, trials in by_experts.items()
        if all(trial.key in points or FAILED + trial.key in points for trial in trials)
        and any(trial.key in points for trial in trials if trial.rows == MANY_ROWS)
    ]


def write_shapes(points: Mapping[str, Any], gpu: str) -> None:
    """Write the fastest shapes to the file that the kernel reads. Shapes for other numbers of experts are kept."""
    chosen = {shape["experts"]: shape for shape in choose(points)}
    if not chosen:
        return
    there = {shape["experts"]: shape for shape in json.loads(tile.SHAPES_FILE.read_text())["shapes"]}
    lines = ",\n".join(f"  {json.dumps(shape)}" for _, shape in sorted((there | chosen).items()))
    origin = f"fastest of those timed on {gpu}: {', '.join(map(str, sorted(chosen)))} experts"
    tile.SHAPES_FILE.write_text(f'{{\n "origin": {json.dumps(origin)},\n "shapes": [\n{lines}\n ]\n}}\n')
    print(f"shapes of {len(chosen)} numbers of experts are in {tile.SHAPES_FILE}", flush=True)


def write_recorded(results: Path) -> None:
    """Write the fastest shapes from the record in a results folder. Do nothing if the record does not exist."""
    path = results / "selection.json"
    if path.exists():
        _write_content(read_record(path, "selection"))


def describe(points: Mapping[str, Any]) -> list[str]:
    """Return one line for every number of experts with complete trials."""
    return [f"{one['experts']} experts: one program {one['one']}, several {one['several']}" for one in choose(points)]


def _write_content(content: Mapping[str, Any]) -> None:
    if content["sessions"]:
        write_shapes(content["points"], str(last_session(content)["hardware"]["gpu"]))


def _choose_shape(experts: int, times: Mapping[Trial, float]) -> dict[str, Any]:
    many = {(trial.tile, trial.warps): us for trial, us in times.items() if trial.rows == MANY_ROWS}
    several = min(many, key=lambda shape: many[shape])
    one: dict[str, int] = {}
    for rows in sorted({trial.rows for trial in times} - {MANY_ROWS}):
        alone = {trial.warps: us for trial, us in times.items() if trial.tile == trial.rows == rows}
        if not alone:
            break
        shared = times.get(Trial(experts, rows, *several)) if several[0] < rows else None
        warps = min(alone, key=lambda warps: alone[warps])
        if shared is not None and (1 - NOISE) * shared < alone[warps]:
            break
        one[str(rows)] = warps
    return {"experts": experts, "one": one, "several": list(several)}


def _time_trial(trial: Trial) -> dict[str, Any]:
    from benchmark.gpu.selection import time_call

    return {**asdict(trial), "trial_us": time_call(_make_call(trial))}


def _run_trial(trial: Trial) -> None:
    _make_call(trial)()


def _make_call(trial: Trial) -> Callable[[], None]:
    from benchmark.gpu.selection import make_call

    call = make_call(trial.rows, trial.experts, PLAN)
    one = {trial.rows: trial.warps} if trial.tile == trial.rows else {}
    shape = tile.Shape(trial.experts, one, (trial.tile, trial.warps))

    def run() -> None:
        with mock.patch.object(tile, "SHAPES", [shape]):
            call()

    return run
