"""The whole run: checks, then tasks in the order of their worth, each in a process of its own.

What a task has measured is on disk, and how it ended is in `run.json`: the same command goes on from there, first with
what has not had its turn, last with what failed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from benchmark.common.paths import ROOT
from benchmark.common.record import Record
from benchmark.common.server import die_with_parent
from benchmark.gpu.checks import shorten
from benchmark.gpu.models import PAGED_SINCE
from benchmark.gpu.preflight import CHECKS
from benchmark.gpu.table import Row, check_row
from sglang_xshare.patching.tree import find_tree
from sglang_xshare.upstream.release import is_since

LONGEST = 1800.0  # seconds of a task where the whole has no limit
CHECKING = 150.0  # seconds of a check: first imports and first compilations, all side by side
GRACE = 10.0  # seconds in which a stopped task may stop its servers
ENDING = 25.0  # seconds that stopping a task, the table and the way back take
MODULE = "benchmark.gpu"  # whose process measures a task
CHECKED = ROOT / "build" / "gpu" / "checked"
"""The checks create this file; a record alone may come from another machine. `scripts/gpu.sh` removes it."""
KERNELS = ("imports", "patch", "upstream")  # what lacks a C compiler fails the last
SERVERS = (*KERNELS, "nvcc", "selection")
SERVERS_32, SERVERS_128 = (
    (*SERVERS, f"compilation-{experts}") for experts in (32, 128)
)  # of the model, which dies late


@dataclass(frozen=True)
class Task:
    """Some parts (or all) of an experiment, what it needs, and seconds expected (`turn`), half of which begin it."""

    experiment: str
    parts: tuple[str, ...] = ()
    turn: float = 40.0
    needs: tuple[str, ...] = ()
    since: str = "0"

    @property
    def name(self) -> str:
        """As `make gpu` takes it."""
        return " ".join([self.experiment, *self.parts])


TASKS: tuple[Task, ...] = (
    Task("selection", ("kernels",), 150.0),
    Task("layer", ("qwen3-30b-a3b",), 90.0, KERNELS),
    Task("server", ("qwen3-30b-a3b",), 400.0, SERVERS_128),
    Task("server", ("gpt-oss-20b",), 210.0, SERVERS_32),
    Task("replay", ("server",), 150.0, SERVERS_128),
    Task("server", ("gpt-oss-120b-no-warm-up",), 300.0, SERVERS_128),
    Task("eagle3", (), 200.0, (*SERVERS_128, "eagle3")),
    Task("server", ("gpt-oss-120b",), 300.0, SERVERS_128),
    Task("layer", ("gpt-oss-120b", "gpt-oss-20b"), 90.0, KERNELS),
    Task("selection", ("shapes",), 60.0),
    Task("tune", (), 120.0, KERNELS),
    Task("paged", (), 300.0, SERVERS_128, PAGED_SINCE),
    Task("replay", ("tests",), 60.0),
    Task("selection", ("tests",), 240.0),
)


def list_tasks() -> list[Task]:
    """All but those of a later release of SGLang than the one here, which are told."""
    running = find_tree().release
    for task in TASKS:
        if not is_since(running, task.since):
            print(f"gpu: {task.name}: left out, from SGLang {task.since} on; here is {running}", flush=True)
    return [task for task in TASKS if is_since(running, task.since)]


def run(results: Path, command: Sequence[str], tasks: Sequence[Task], limit: float | None, policy: str | None) -> bool:
    """Check, then give every task that is not done its turn. Returns whether none failed."""
    end = None if limit is None else monotonic() + limit - ENDING
    record = Record(results, "run", command)
    check_all(record)
    undone = [task for task in tasks if not _is_done(task, record, results)]
    undone.sort(key=lambda task: (bool(_find(task, record).get("reason")), _find(task, record).get("turns", 0)))
    left_over, failed = [], []
    for task in undone:
        left = LONGEST if end is None else end - monotonic()
        if missing := [name for name in task.needs if not record.points[check_key(name)]["passed"]]:
            failed.append(f"{task.name}: needs {', '.join(missing)}")
            continue
        if left < task.turn / 2:
            left_over.append(task.name)
            continue
        turn = left if end is None or task is undone[-1] else min(task.turn, left)
        print(f"gpu: {task.name}, at most {turn:.0f} s", flush=True)
        arguments = ["-m", MODULE, task.experiment, *task.parts, "--out", str(results)]
        if policy and task.experiment == "tune":
            arguments += ["--policy", policy]
        ended = run_process(arguments, turn)
        is_cut = ended.status is None
        turns = _find(task, record).get("turns", 0) + (not is_cut or turn >= task.turn)
        reason = ended.reason if ended.status else None
        record.add(_key(task), done=ended.status == 0, reason=reason, turns=turns, seconds=round(ended.seconds, 1))
        if is_cut:
            left_over.append(task.name)
        elif reason:
            failed.append(f"{task.name}: {reason}")
    for line in failed:
        print(f"gpu: {line}", flush=True)
    if left_over:
        print(f"gpu: left for the same command: {', '.join(left_over)}", flush=True)
    return not failed


def check_all(record: Record) -> None:
    """Run every check that the record does not hold as passed on this machine, side by side, and keep what came out."""
    known = record.points if CHECKED.exists() else {}
    missing = [name for name in CHECKS if not known.get(check_key(name), {}).get("passed")]
    if missing:
        commands = [["-W", "ignore", "-m", "benchmark.gpu.preflight", name] for name in missing]
        with ThreadPoolExecutor(len(missing)) as threads:
            all_ended = list(threads.map(lambda command: run_process(command, CHECKING), commands))
        for name, ended in zip(missing, all_ended, strict=True):
            reason = "no answer in time" if ended.status is None else ended.reason or None
            record.add(check_key(name), passed=reason is None, reason=reason)
    CHECKED.parent.mkdir(parents=True, exist_ok=True)
    CHECKED.touch()


def rows(points: Mapping[str, Any]) -> list[Row]:
    """The checks, and every task that did not end as it should."""
    found = []
    for name, check in CHECKS.items():
        if check_key(name) in points:
            what = f"{name}: {(check.__doc__ or '').partition(chr(10))[0].rstrip('.')}"
            found.append(check_row(what, points[check_key(name)]))
    for key, point in points.items():
        if key.startswith("task ") and not point["done"]:
            what = key.removeprefix("task ")
            found.append(Row(what, point["reason"], "done", False) if point["reason"] else Row(what, "not finished"))
    return found


def check_key(name: str) -> str:
    """A check's key in the record of the run."""
    return f"check {name}"


@dataclass(frozen=True)
class Ended:
    """How a process ended. `status`: None where its time was over; `reason`: what it said last, if it failed."""

    status: int | None
    reason: str
    seconds: float


def run_process(arguments: Sequence[str], limit: float) -> Ended:
    """Run Python with these arguments for `limit` seconds at most; then it is stopped, with all that it has started."""
    began = monotonic()
    process = subprocess.Popen(
        [sys.executable, "-u", *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    said, status = "", None
    try:
        said = process.communicate(timeout=limit)[1]
        status = process.returncode
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            said = process.communicate(timeout=GRACE)[1]
    finally:
        _signal(process, signal.SIGKILL)  # what it left behind, and itself if we were interrupted
        process.wait()
    print(said, end="", file=sys.stderr, flush=True)
    lines = [line for line in said.splitlines() if line.strip()] or [f"status {status}"]
    told = next((line for line in reversed(lines) if line.startswith("gpu: ")), lines[-1])
    return Ended(status, shorten(told.removeprefix("gpu: ")) if status else "", monotonic() - began)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """To all of its session's group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _is_done(task: Task, record: Record, results: Path) -> bool:
    """Also asks for the experiment's record: whoever deletes it wants it measured anew."""
    return bool(_find(task, record).get("done")) and (results / f"{task.experiment}.json").exists()


def _find(task: Task, record: Record) -> dict[str, Any]:
    """What is recorded of it."""
    return record.points.get(_key(task), {})


def _key(task: Task) -> str:
    return f"task {task.name}"
