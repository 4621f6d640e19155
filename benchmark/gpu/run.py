"""The whole GPU run: first the checks, and then the tasks. Each task runs in its own process.

The most useful tasks come first. Every measured point is written to disk at once, and `run.json` contains the result of
each task. So the same command continues an interrupted run. It starts with the tasks that have not run yet, and ends
with the tasks that failed.

The checks, the tasks without timing and the start of the first server run in parallel. Nothing is timed before they
end. After that, the server is idle, and only one process at a time uses the GPU.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from benchmark.common.paths import ROOT
from benchmark.common.record import Record
from benchmark.gpu.checks import is_passed
from benchmark.gpu.preflight import CHECKS
from benchmark.gpu.process import Ended, Process
from benchmark.gpu.server import GATE
from benchmark.gpu.serving import has_room
from benchmark.gpu.table import Row, check_row

LONGEST = 1800.0  # maximum seconds of a task if the run has no limit
CHECKING = 150.0  # maximum seconds of the checks, which run in parallel; they include first imports and compilations
ROUND = 20.0  # minimum seconds that a ready server needs for its rounds
READY = 150.0  # seconds after the checks within which the first server must be ready
ENDING = 25.0  # seconds to stop a task, write the table and copy the records back
MODULE = "benchmark.gpu"  # runs one task in a process of its own
CHECKED = ROOT / "build" / "gpu" / "checked"
"""The file that proves that the checks have run on this machine. A record alone can come from another machine.

`scripts/gpu.sh` removes the file.
"""
KERNELS = ("imports", "patch", "upstream")  # the check `upstream` also fails if there is no C compiler
SERVERS = (*KERNELS, "nvcc", "selection")
SERVERS_32, SERVERS_128 = ((*SERVERS, f"compilation-{experts}") for experts in (32, 128))


@dataclass(frozen=True)
class Task:
    """A task of the run, which measures an experiment or some parts of it.

    - `parts`: the parts of the experiment to measure. An empty tuple means all parts.
    - `turn`: the expected duration in seconds. A task starts only if half of this time is left.
    - `needs`: the checks that must have passed.
    - `is_quick`: in a run with a limit, other tasks start only after all quick tasks are done.
    - `beside`: the task times nothing, so it runs in parallel with the checks.
    - `serves`: the server of the task can start in parallel with the checks if the GPU has enough memory.
    """

    experiment: str
    parts: tuple[str, ...] = ()
    turn: float = 40.0
    needs: tuple[str, ...] = ()
    is_quick: bool = False
    beside: bool = False
    serves: bool = False

    @property
    def name(self) -> str:
        """Return the experiment and its parts, as they are spelt for `make gpu`."""
        return " ".join([self.experiment, *self.parts])

    @property
    def key(self) -> str:
        """Return the key of the task in the run's record."""
        return f"task {self.name}"


TASKS: tuple[Task, ...] = (
    Task("selection", ("ids",), 120.0, is_quick=True, beside=True),
    Task("caches", (), 120.0, is_quick=True, beside=True),
    Task("levers", (), 75.0, KERNELS, is_quick=True),
    Task("tune", ("fixed",), 75.0, KERNELS, is_quick=True),
    Task("selection", ("times",), 60.0, is_quick=True),
    Task("server", ("gpt-oss-120b-no-warm-up",), 140.0, SERVERS_128, is_quick=True, serves=True),
    Task("server", ("qwen3-30b-a3b",), 210.0, SERVERS_128, is_quick=True, serves=True),
    Task("routing", ("128",), 60.0, KERNELS, is_quick=True),
    Task("layer", ("qwen3-30b-a3b",), 90.0, KERNELS),
    Task("server", ("gpt-oss-20b",), 210.0, SERVERS_32),
    Task("replay", ("server",), 150.0, SERVERS_128),
    Task("eagle3", (), 200.0, (*SERVERS_128, "eagle3")),
    Task("server", ("gpt-oss-120b",), 300.0, SERVERS_128),
    Task("layer", ("gpt-oss-120b", "gpt-oss-20b"), 90.0, KERNELS),
    Task("selection", ("shapes",), 60.0),
    Task("tune", (), 120.0, KERNELS),
    Task("replay", ("tests",), 60.0),
    Task("selection", ("tests",), 240.0),
)


def run(results: Path, command: Sequence[str], tasks: Sequence[Task], limit: float | None, policy: str | None) -> bool:
    """Run the checks, and then every task that is not done. Return whether none of them failed."""
    record = Record(results, "run", command)
    points = record.points
    # If the record of an experiment has been deleted, the experiment runs again.
    undone = [
        task
        for task in tasks
        if not (points.get(task.key, {}).get("done") and (results / f"{task.experiment}.json").exists())
    ]
    if limit is not None:
        undone = [task for task in undone if task.is_quick] or undone
    known = {task: points.get(task.key, {}) for task in undone}
    undone.sort(key=lambda task: (bool(known[task].get("reason")), known[task].get("turns", 0)))
    run_ = _Run(record, results, policy, None if limit is None else monotonic() + limit - ENDING)
    with run_.start_server(undone):
        needed = dict.fromkeys(name for task in undone for name in task.needs)
        run_.prepare([task for task in undone if task.beside], needed)
        for task in undone:
            if not task.beside:
                run_.take_turn(task, is_last=task is undone[-1])
    for line in run_.failed:
        print(f"gpu: {line}", flush=True)
    if run_.left_over:
        print(f"gpu: the same command continues with: {', '.join(run_.left_over)}", flush=True)
    return not run_.failed


class _Run:
    """A run of several tasks. `end` is the time at which the run must stop, or None."""

    def __init__(self, record: Record, results: Path, policy: str | None, end: float | None) -> None:
        self.record, self.results, self.policy, self.end = record, results, policy, end
        self.failed: list[str] = []
        self.left_over: list[str] = []
        self.gate = CHECKED.with_name("gate")
        self._early: tuple[Task, Process] | None = None

    @property
    def left(self) -> float:
        """Return the number of seconds until the end of the run."""
        return LONGEST if self.end is None else self.end - monotonic()

    @contextmanager
    def start_server(self, tasks: Sequence[Task]) -> Iterator[None]:
        """Start the first task that serves a model, if the GPU has enough memory for other work at the same time.

        The task waits until the gate file is removed.
        """
        self.gate.parent.mkdir(parents=True, exist_ok=True)
        self.gate.unlink(missing_ok=True)
        task = next((task for task in tasks if task.serves), None)
        if task is not None and has_room():
            print(f"gpu: {task.name} is started", flush=True)
            self._early = task, Process(self._arguments(task), {GATE: str(self.gate)})
        try:
            yield
        finally:
            self._stop_early()

    def prepare(self, tasks: Sequence[Task], checks: Iterable[str]) -> None:
        """Run the checks and these tasks in parallel. Then wait until the server that was started early is ready."""
        with ThreadPoolExecutor(1 + len(tasks)) as threads:
            checking = threads.submit(check_all, self.record, checks)
            running = [
                threads.submit(Process(self._arguments(task)).finish, min(task.turn, self.left)) for task in tasks
            ]
            checking.result()
            for task, ended in zip(tasks, running, strict=True):
                self._keep(task, ended.result(), task.turn)
        until = monotonic() + min(READY, self.left)
        while self._early is not None and not self.gate.exists():
            if self._early[1].status is not None:
                break  # `take_turn` reports the failure
            if monotonic() > until:
                print(f"gpu: {self._early[0].name}: no server yet; the task stops until its turn", flush=True)
                self._stop_early()
            sleep(0.2)

    def take_turn(self, task: Task, is_last: bool) -> None:
        """Run a task until it ends or its time is used up."""
        missing = [name for name in task.needs if not is_passed(self.record.points, check_key(name))]
        if missing:
            self.failed.append(f"{task.name}: needs {', '.join(missing)}")
            return
        started = self._early[1] if self._early is not None and self._early[0] is task else None
        if self.left < (ROUND if started else task.turn / 2):
            self.left_over.append(task.name)
            return
        turn = self.left if self.end is None or is_last else min(task.turn, self.left)
        print(f"gpu: {task.name}, at most {turn:.0f} s", flush=True)
        if started is not None:
            self._early = None
            self.gate.unlink(missing_ok=True)
        process = started or Process(self._arguments(task))
        self._keep(task, process.finish(turn), turn)

    def _keep(self, task: Task, ended: Ended, turn: float) -> None:
        """Record the result of a task."""
        is_cut = ended.status is None
        turns = self.record.points.get(task.key, {}).get("turns", 0) + (not is_cut or turn >= task.turn)
        reason = ended.reason if ended.status else None
        seconds = round(ended.seconds, 1)
        self.record.add(task.key, done=ended.status == 0, reason=reason, turns=turns, seconds=seconds)
        if is_cut:
            self.left_over.append(task.name)
        elif reason:
            self.failed.append(f"{task.name}: {reason}")

    def _stop_early(self) -> None:
        if self._early is not None:
            self._early[1].finish(0.0)
            self._early = None
        self.gate.unlink(missing_ok=True)

    def _arguments(self, task: Task) -> list[str]:
        policy = ["--policy", self.policy] if self.policy and task.experiment == "tune" else []
        return ["-m", MODULE, task.experiment, *task.parts, "--out", str(self.results), *policy]


def check_all(record: Record, names: Iterable[str]) -> None:
    """Run the checks in parallel and record the results. Checks that have passed on this machine are skipped."""
    known = record.points if CHECKED.exists() else {}
    missing = [name for name in names if not is_passed(known, check_key(name))]
    processes = {name: Process(["-W", "ignore", "-m", "benchmark.gpu.preflight", name]) for name in missing}
    until = monotonic() + CHECKING
    for name, process in processes.items():
        ended = process.finish(max(0.0, until - monotonic()))
        reason = "no answer in time" if ended.status is None else ended.reason or None
        record.add(check_key(name), passed=reason is None, reason=reason)
    CHECKED.parent.mkdir(parents=True, exist_ok=True)
    CHECKED.touch()


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each check, and for each task that failed or did not finish."""
    for key, point in points.items():
        kind, _, name = key.partition(" ")
        if kind == "check":
            check = CHECKS.get(name)
            what = (getattr(check, "func", check).__doc__ or "").partition("\n")[0].rstrip(".")
            yield check_row(f"{name}: {what}" if check else name, point)
        elif not point["done"]:
            yield Row(name, point["reason"], "done", False) if point["reason"] else Row(name, "not finished")


def check_key(name: str) -> str:
    """Return the key of a check in the run's record."""
    return f"check {name}"
