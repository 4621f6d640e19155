"""Whatever stops a run, at whatever point: the tree is wholly patched or wholly not, or the next run makes it so.

Runs happen in forked children, so that SIGKILL is the real one: at every point where something changes on disk, in
order; (`long`) at every executed line of the engine; and 100 times at random moments on one tree, recoveries included,
by an alarm that nobody handles, which ends a process as suddenly.
"""

import errno
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from patching.fake import (
    FILES,
    LATER_PATCHED,
    LATER_QUEUE,
    PATCHED,
    read_modes,
    read_tree,
    run_child,
    write_queue,
    write_tree,
)
from sglang_xshare.patching import PatchError, apply, check_patched, revert
from sglang_xshare.patching.state import STORE

CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.utime"}
KILLED, FINISHED = -signal.SIGKILL, 0


class Lab:
    """A fake tree with two versions of a queue, and what it must look like after each operation."""

    def __init__(self, directory: Path) -> None:
        self.reached = directory / "reached"  # made by a trap as it stops the run
        self.tree = write_tree(directory / "site-packages")
        self.modes = read_modes(self.tree)
        early, later = write_queue(directory / "early"), write_queue(directory / "later", LATER_QUEUE)
        self.operations: dict[str, Callable[[], object]] = {
            "apply": lambda: apply(self.tree, early),
            "apply later": lambda: apply(self.tree, later),
            "revert": lambda: revert(self.tree),
        }
        self.queues = {"apply": early, "apply later": later}
        self.contents = {"apply": PATCHED, "apply later": LATER_PATCHED, "revert": FILES}

    def check_known(self) -> None:
        """No file is torn: each is whole, old or new."""
        for path, content in read_tree(self.tree).items():
            assert any(content == known.get(path) for known in self.contents.values()), path

    def check_importable(self) -> None:
        """Whatever was stopped, a file that calls the added one finds it."""
        found = read_tree(self.tree)
        if b"ours" in found["sglang/srt/route.py"]:
            assert "sglang/srt/ours.py" in found

    def check_honest(self) -> None:
        """A tree that passes a server's check is wholly patched with that queue."""
        for name, queue in self.queues.items():
            try:
                check_patched(self.tree, queue)
            except PatchError:
                continue
            assert read_tree(self.tree) == self.contents[name]

    def finish(self, name: str) -> None:
        """Run `name` undisturbed: it succeeds, and the tree is exactly what it promises."""
        self.operations[name]()
        assert read_tree(self.tree) == self.contents[name]
        if name in self.queues:
            check_patched(self.tree, self.queues[name])
            assert not list((self.tree / STORE).rglob("*.patched"))
        else:
            assert read_modes(self.tree) == self.modes


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _trap_changes(lab: Lab, at: int, stop: Callable[[], object]) -> None:
    """In this process, call `stop` at the `at`-th change of the tree (before it happens), fsync included."""
    count = 0

    def pass_by() -> None:
        nonlocal count
        count += 1
        if count == at:
            lab.reached.touch()
            stop()

    def audit(event: str, args: tuple[object, ...]) -> None:
        inside = event in CHANGES and str(args[0]).startswith(str(lab.tree))
        if inside and not (event == "open" and str(args[1]).startswith("r")):
            pass_by()

    def sync(fd: Any) -> None:  # audit events leave it out
        pass_by()
        fsync(fd)

    fsync, os.fsync = os.fsync, sync
    sys.addaudithook(audit)


def _trap_lines(lab: Lab, at: int, stop: Callable[[], object]) -> None:
    """In this process, call `stop` before the `at`-th line of the engine."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if "sglang_xshare/patching" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        if count == at:
            lab.reached.touch()
            stop()
        return trace

    sys.settrace(trace)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _dawdle(seconds: float = 0.0) -> None:
    """In this process, take as long to move a file as a disk does, so that kills at random moments fall in between.

    After `seconds` (0: never) the process dies. It sets its own alarm: on a busy machine a parent's clock runs for tens
    of milliseconds before its child does anything, and all 100 kills came before the first change.
    """

    def move_slowly(*names: Any, **options: Any) -> None:
        time.sleep(0.002)
        move(*names, **options)

    move, os.replace = os.replace, move_slowly
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


Trap = Callable[[Lab, int, Callable[[], object]], None]
CASES = [
    pytest.param(start, stopped, id=f"{stopped} on {start}")
    for start, stopped in [
        ("revert", "apply"),
        ("apply", "revert"),
        ("apply", "apply later"),
    ]
]


def _stop_everywhere(
    scratch: Path, start: str, stopped: str, trap: Trap, stop: Callable[[], object]
) -> Iterator[tuple[Lab, int, int]]:
    """A fresh lab set to `start`, then `stopped` at its point 1, 2, 3 ... to the last: lab, point, exit code."""
    for at in range(1, 10_000):
        lab = Lab(scratch / str(at))
        lab.finish(start)
        code = _wait(run_child(lab.operations[stopped], partial(trap, lab, at, stop)))
        if not lab.reached.exists():
            print(f"{stopped}: stopped at {at - 1} points")
            assert code == FINISHED
            assert at > 20  # there were points to stop at
            return
        yield lab, at, code
        shutil.rmtree(scratch / str(at))


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """In memory where possible: these tests sync a few thousand times, which tells a killed process nothing."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.parametrize("trap", [_trap_changes, pytest.param(_trap_lines, marks=pytest.mark.long)])
@pytest.mark.parametrize(("start", "stopped"), CASES)
def test_killed_everywhere(scratch: Path, start: str, stopped: str, trap: Trap) -> None:
    """The next run, whichever it is, makes the tree whole."""
    for lab, at, code in _stop_everywhere(scratch, start, stopped, trap, _kill):
        assert code == KILLED
        lab.check_known()
        lab.check_importable()
        lab.check_honest()
        lab.finish(list(lab.operations)[at % 3])


@pytest.mark.parametrize(("start", "stopped"), CASES)
def test_a_disk_error_everywhere(scratch: Path, start: str, stopped: str) -> None:
    """An error is not a kill: apply on a pristine tree takes everything back itself, or was not hindered."""
    for lab, at, code in _stop_everywhere(scratch, start, stopped, _trap_changes, _fail):
        lab.check_known()
        lab.check_importable()
        lab.check_honest()
        if code == FINISHED:  # the error was of no consequence: making a directory that exists
            assert read_tree(lab.tree) == lab.contents[stopped]
        elif start == "revert":
            assert read_tree(lab.tree) == FILES
            assert read_modes(lab.tree) == lab.modes
        lab.finish(list(lab.operations)[at % 3])


@pytest.mark.long  # kills by the clock: a busy machine may hit no middle
def test_killed_a_hundred_times_at_random(scratch: Path) -> None:
    """Kills follow each other: recoveries are killed too. About every fourth time a run may finish, and is checked."""
    choose = random.Random(20261120)
    lab = Lab(scratch)
    started = time.monotonic()
    for work in lab.operations.values():
        assert _wait(run_child(work, _dawdle)) == FINISHED
    longest = (time.monotonic() - started) / len(lab.operations) / 2  # then about every third run finishes
    kills = runs = halves = 0
    while kills < 100:
        runs += 1
        name = choose.choice(list(lab.operations))
        code = _wait(run_child(lab.operations[name], partial(_dawdle, choose.uniform(0.001, longest))))
        assert code in (FINISHED, -signal.SIGALRM)
        kills += code != FINISHED
        lab.check_known()
        lab.check_importable()
        lab.check_honest()
        halves += read_tree(lab.tree) not in lab.contents.values()
        if choose.random() < 0.25:
            lab.finish(choose.choice(list(lab.operations)))
    print(f"{kills} kills in {runs} runs, the tree half patched after {halves}")
    assert halves > 0  # the kills did hit the middle
    lab.finish("revert")
