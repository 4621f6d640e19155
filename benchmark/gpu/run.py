"""The whole run: checks, then tasks in the order of their worth, each in a process and for a turn of its own.

A task that does not end within its turn goes on when the others have had theirs; one that failed is not tried again in
this run. What a task has measured is on disk, and how it ended is in `run.json`: the same command goes on from there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time
from typing import Any

from benchmark.common.record import Record
from benchmark.gpu import preflight
from benchmark.gpu.bring_back import keep_logs
from benchmark.gpu.models import PAGED_SINCE
from benchmark.gpu.process import Ended, run_process
from benchmark.gpu.table import Row
from sglang_xshare.patching.release import is_since
from sglang_xshare.patching.tree import find_tree

TURN = 570.0  # seconds of a task where the whole has no limit
ENDING = 25.0  # seconds that stopping a task, the table and the way back take
MODULE = "benchmark.gpu"  # whose process measures a task
KERNELS = ("imports", "patch", "upstream")  # what lacks a C compiler fails the last
SERVERS = (*KERNELS, "nvcc", "selection")
SERVERS_32, SERVERS_128 = (
    (*SERVERS, f"compilation-{experts}") for experts in (32, 128)
)  # of the model, which dies late


@dataclass(frozen=True)
class Task:
    """Some parts of an experiment; all of them where none is named.

    It is given so many seconds before the others have their turn, and not begun with fewer than `least` left, in which
    it would measure nothing; nor without the checks that it needs.
    """

    experiment: str
    parts: tuple[str, ...] = ()
    turn: float = TURN
    least: float = 20.0
    needs: tuple[str, ...] = ()
    since: str = "0"
    """The first release of SGLang that has what it measures."""

    @property
    def name(self) -> str:
        """As `make gpu` takes it."""
        return " ".join([self.experiment, *self.parts])


# A turn is what we expect of it, starts included; two servers of a large model take up to two minutes to start.
TASKS: tuple[Task, ...] = (
    Task("selection", ("kernels",), 150.0),
    Task("layer", ("qwen3-30b-a3b",), 90.0, needs=KERNELS),
    Task("server", ("qwen3-30b-a3b",), 300.0, 150.0, SERVERS_128),
    Task("server", ("gpt-oss-20b",), 210.0, 120.0, SERVERS_32),
    Task("replay", ("server",), 150.0, 90.0, SERVERS_128),
    Task("server", ("gpt-oss-120b-no-warm-up",), 300.0, 150.0, SERVERS_128),
    Task("eagle3", (), 200.0, 150.0, (*SERVERS_128, "eagle3")),
    Task("server", ("gpt-oss-120b",), 300.0, 150.0, SERVERS_128),
    Task("layer", ("gpt-oss-120b", "gpt-oss-20b"), 90.0, needs=KERNELS),
    Task("server", ("qwen3-30b-a3b-aligned",), 180.0, 120.0, SERVERS_128),
    Task("selection", ("shapes",), 60.0),
    Task("tune", (), 120.0, 60.0, KERNELS),
    Task("paged", (), 300.0, 150.0, SERVERS_128, PAGED_SINCE),
    Task("replay", ("tests",), 60.0),
    Task("selection", ("tests",), 240.0, 60.0),
)


def list_tasks() -> list[Task]:
    """All but those of a later release of SGLang than the one here, which are told."""
    running = find_tree().release
    for task in TASKS:
        if not is_since(running, task.since):
            print(f"gpu: {task.name}: left out, from SGLang {task.since} on; here is {running}", flush=True)
    return [task for task in TASKS if is_since(running, task.since)]


def run(results: Path, command: Sequence[str], tasks: Sequence[Task], limit: float | None, policy: str | None) -> bool:
    """Check, then run the tasks until all are done, failed, or out of time. Returns whether none failed."""
    end = None if limit is None else monotonic() + limit - ENDING
    record = Record(results, "run", command)
    preflight.check_all(record)
    tried: set[str] = set()
    while (task := _choose(tasks, record, results, None if end is None else end - monotonic(), tried)) is not None:
        left = TURN if end is None else end - monotonic()
        turn = min(TURN if end is None else task.turn, left)
        print(f"gpu: {task.name}, at most {turn:.0f} s", flush=True)
        before = _stamp(results, task)
        ended = run_process(_command(task, results, policy), turn, _environment(record))
        cut = ended.status is None and turn < task.turn
        if ended.status is None and not cut and _stamp(results, task) == before:
            ended = Ended(1, f"nothing measured in {turn:.0f} s", ended.seconds)
        if ended.status is not None:
            tried.add(task.name)
        if ended.status != 0:
            keep_logs(results, task.name, time() - ended.seconds)
        _keep(record, task, ended, cut)
    return not _report(tasks, record, results)


def rows(points: Mapping[str, Any]) -> list[Row]:
    """The checks, and every task that did not end as it should."""
    found = preflight.rows(points)
    for key, point in points.items():
        if key.startswith("task ") and not point["done"]:
            what = key.removeprefix("task ")
            found.append(Row(what, point["reason"], "done", False) if point["reason"] else Row(what, "not finished"))
    return found


def _choose(tasks: Sequence[Task], record: Record, results: Path, left: float | None, tried: set[str]) -> Task | None:
    """The next task: first those with the fewest failures, of these with the fewest turns, else in the order given."""

    def urgency(task: Task) -> tuple[int, int]:
        point = record.points.get(_key(task), {})
        return point.get("failures", 0), point.get("turns", 0)

    able = [
        task
        for task in tasks
        if task.name not in tried
        and not _is_done(task, record, results)
        and not _missing(task, record)
        and (left is None or left >= task.least)
    ]
    return min(able, key=urgency, default=None)


def _is_done(task: Task, record: Record, results: Path) -> bool:
    """Also asks for the experiment's record: whoever deletes it wants it measured anew."""
    return bool(record.points.get(_key(task), {}).get("done")) and (results / f"{task.experiment}.json").exists()


def _missing(task: Task, record: Record) -> list[str]:
    """Checks that the task needs and that failed."""
    return [name for name in task.needs if not record.points[preflight.check_key(name)]["passed"]]


def _keep(record: Record, task: Task, ended: Ended, cut: bool) -> None:
    """Add to the task's point. A turn that the end of the whole run cut short counts as none."""
    old = record.points.get(_key(task), {})
    record.add(
        _key(task),
        done=ended.status == 0,
        reason=ended.reason if ended.status else None,
        turns=old.get("turns", 0) + (not cut),
        failures=old.get("failures", 0) + bool(ended.status),
        seconds=round(old.get("seconds", 0.0) + ended.seconds, 1),
    )


def _report(tasks: Sequence[Task], record: Record, results: Path) -> list[str]:
    """Say what is left, one line each kind; the tasks that failed, or that a failed check forbade."""
    undone = [task for task in tasks if not _is_done(task, record, results)]
    failed = []
    for task in undone:
        missing = _missing(task, record)
        reason = f"needs {', '.join(missing)}" if missing else record.points.get(_key(task), {}).get("reason")
        if reason:
            failed.append(task.name)
            print(f"gpu: {task.name}: {reason}", flush=True)
    if left := [task.name for task in undone if task.name not in failed]:
        print(f"gpu: left for the same command: {', '.join(left)}", flush=True)
    return failed


def _command(task: Task, results: Path, policy: str | None) -> Iterator[str]:
    yield from ("-m", MODULE, task.experiment, *task.parts, "--out", str(results))
    if policy and task.experiment == "tune":
        yield from ("--policy", policy)


def _environment(record: Record) -> dict[str, str]:
    """What the checks found that our kernel needs."""
    points = [record.points.get(preflight.check_key(name), {}) for name in preflight.CHECKS]
    return {key: value for point in points for key, value in (point.get("env") or {}).items()}


def _stamp(results: Path, task: Task) -> int | None:
    """Changes with every point that the task measures."""
    path = results / f"{task.experiment}.json"
    return path.stat().st_mtime_ns if path.exists() else None


def _key(task: Task) -> str:
    return f"task {task.name}"
