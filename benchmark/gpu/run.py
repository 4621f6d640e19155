"""The whole run: checks, then steps in the order of their worth, each in a process and for a turn of its own.

A step that does not end within its turn goes on when the others have had theirs; one that failed is not tried again in
this run. What a step has measured is on disk, and how it ended is in `run.json`: the same command goes on from there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time
from typing import Any

from benchmark.common.record import Record
from benchmark.gpu import preflight
from benchmark.gpu.bring_back import keep_logs
from benchmark.gpu.process import Ended, run_process
from benchmark.gpu.table import Row

TURN = 570.0  # seconds of a step where the whole has no limit
ENDING = 25.0  # seconds that stopping a step, the table and the way back take
KERNELS = ("imports", "patch", "upstream")
SERVERS = (*KERNELS, "nvcc", "selection")


@dataclass(frozen=True)
class Step:
    """Some parts of an experiment; all of them where none is named.

    It is given so many seconds before the others have their turn, and not begun with fewer than `least` left, in which
    it would measure nothing; nor without the checks that it needs.
    """

    experiment: str
    parts: tuple[str, ...] = ()
    turn: float = TURN
    least: float = 20.0
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As `make gpu` takes it."""
        return " ".join([self.experiment, *self.parts])


# A turn is what we expect of it, starts included; two servers of a large model take up to two minutes to start.
STEPS = (
    Step("selection", ("kernels",), 150.0),
    Step("layer", ("qwen3-30b-a3b",), 90.0, needs=KERNELS),
    Step("server", ("qwen3-30b-a3b",), 300.0, 150.0, SERVERS),
    Step("server", ("gpt-oss-20b",), 210.0, 120.0, SERVERS),
    Step("replay", ("server",), 150.0, 90.0, SERVERS),
    Step("server", ("gpt-oss-120b-no-warm-up",), 300.0, 150.0, SERVERS),
    Step("eagle3", (), 200.0, 150.0, SERVERS),
    Step("server", ("gpt-oss-120b",), 300.0, 150.0, SERVERS),
    Step("layer", ("gpt-oss-120b", "gpt-oss-20b"), 90.0, needs=KERNELS),
    Step("server", ("qwen3-30b-a3b-aligned",), 180.0, 120.0, SERVERS),
    Step("tune", (), 120.0, 60.0, KERNELS),
    Step("replay", ("tests",), 60.0),
    Step("selection", ("tests",), 240.0, 60.0),
)


def run(results: Path, command: Sequence[str], steps: Sequence[Step], limit: float | None, policy: str | None) -> bool:
    """Check, then run the steps until all are done, failed, or out of time. Returns whether none failed."""
    end = None if limit is None else monotonic() + limit - ENDING
    record = Record(results, "run", command)
    preflight.check_all(record)
    tried: set[str] = set()
    while (step := _choose(steps, record, results, None if end is None else end - monotonic(), tried)) is not None:
        left = TURN if end is None else end - monotonic()
        turn = min(TURN if end is None else step.turn, left)
        print(f"gpu: {step.name}, at most {turn:.0f} s", flush=True)
        before = _stamp(results, step)
        ended = run_process(_command(step, results, policy), turn, _environment(record))
        cut = ended.status is None and turn < step.turn
        if ended.status is None and not cut and _stamp(results, step) == before:
            ended = Ended(1, f"nothing measured in {turn:.0f} s", ended.seconds)
        if ended.status is not None:
            tried.add(step.name)
        if ended.status != 0:
            keep_logs(results, step.name, time() - ended.seconds)
        _keep(record, step, ended, cut)
    return not _report(steps, record, results)


def rows(points: Mapping[str, Any]) -> list[Row]:
    """The checks, and every step that did not end as it should."""
    found = preflight.rows(points)
    for key, point in points.items():
        if key.startswith("step ") and not point["done"]:
            what = key.removeprefix("step ")
            found.append(Row(what, point["reason"], "done", False) if point["reason"] else Row(what, "not finished"))
    return found


def _choose(steps: Sequence[Step], record: Record, results: Path, left: float | None, tried: set[str]) -> Step | None:
    """The next step: first those with the fewest failures, of these with the fewest turns, else in the order given."""

    def urgency(step: Step) -> tuple[int, int]:
        point = record.points.get(_key(step), {})
        return point.get("failures", 0), point.get("turns", 0)

    able = [
        step
        for step in steps
        if step.name not in tried
        and not _is_done(step, record, results)
        and not _missing(step, record)
        and (left is None or left >= step.least)
    ]
    return min(able, key=urgency, default=None)


def _is_done(step: Step, record: Record, results: Path) -> bool:
    """Also asks for the experiment's record: whoever deletes it wants it measured anew."""
    return bool(record.points.get(_key(step), {}).get("done")) and (results / f"{step.experiment}.json").exists()


def _missing(step: Step, record: Record) -> list[str]:
    """Checks that the step needs and that failed."""
    return [name for name in step.needs if not record.points[preflight.check_key(name)]["passed"]]


def _keep(record: Record, step: Step, ended: Ended, cut: bool) -> None:
    """Add to the step's point. A turn that the end of the whole run cut short counts as none."""
    old = record.points.get(_key(step), {})
    record.add(
        _key(step),
        done=ended.status == 0,
        reason=ended.reason if ended.status else None,
        turns=old.get("turns", 0) + (not cut),
        failures=old.get("failures", 0) + bool(ended.status),
        seconds=round(old.get("seconds", 0.0) + ended.seconds, 1),
    )


def _report(steps: Sequence[Step], record: Record, results: Path) -> list[str]:
    """Say what is left, one line each kind; the steps that failed, or that a failed check forbade."""
    undone = [step for step in steps if not _is_done(step, record, results)]
    failed = []
    for step in undone:
        missing = _missing(step, record)
        reason = f"needs {', '.join(missing)}" if missing else record.points.get(_key(step), {}).get("reason")
        if reason:
            failed.append(step.name)
            print(f"gpu: {step.name}: {reason}", flush=True)
    if left := [step.name for step in undone if step.name not in failed]:
        print(f"gpu: left for the same command: {', '.join(left)}", flush=True)
    return failed


def _command(step: Step, results: Path, policy: str | None) -> Iterator[str]:
    yield from ("-m", "benchmark.gpu", step.experiment, *step.parts, "--out", str(results))
    if policy and step.experiment == "tune":
        yield from ("--policy", policy)


def _environment(record: Record) -> dict[str, str]:
    """What the checks found that our kernel needs."""
    points = [record.points.get(preflight.check_key(name), {}) for name in preflight.CHECKS]
    return {key: value for point in points for key, value in (point.get("env") or {}).items()}


def _stamp(results: Path, step: Step) -> int | None:
    """Changes with every point that the step measures."""
    path = results / f"{step.experiment}.json"
    return path.stat().st_mtime_ns if path.exists() else None


def _key(step: Step) -> str:
    return f"step {step.name}"
