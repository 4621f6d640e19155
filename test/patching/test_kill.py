"""Whatever stops a run, at whatever point: the tree is wholly patched or wholly not, or the next run makes it so.

Runs happen in forked children, so that SIGKILL is the real one: at every point where something changes on disk, in
order, and (`long`) at every executed line of the engine; on whole trees and on one that a kill has left half patched.
"""

import errno
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from patching.fake import FILES, LATER_PATCHED, LATER_QUEUE, PATCHED, write_queue, write_tree
from patching.runs import read_modes, read_tree, run_child
from sglang_xshare.patching import PatchError, apply, check_patched, engine, revert
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

    def check(self) -> None:
        """Whatever was stopped: no file is torn, each file that calls the added one finds it, and a tree that passes a
        server's check is wholly patched with that queue.
        """
        found = read_tree(self.tree)
        for path, content in found.items():
            assert any(content == known.get(path) for known in self.contents.values()), path
        assert b"ours" not in found["sglang/srt/route.py"] or "sglang/srt/ours.py" in found
        for name, queue in self.queues.items():
            with suppress(PatchError):
                check_patched(self.tree, queue)
                assert found == self.contents[name]

    def start(self, name: str) -> None:
        """Bring the tree to where a run begins: what an operation leaves, or an apply that is killed half way."""
        if name != HALF:
            self.finish(name)
            return
        moves = iter([engine.replace_file] * 2)
        kill_third = partial(setattr, engine, "replace_file", lambda *files: next(moves, lambda *_: _kill())(*files))
        assert _wait(run_child(self.operations["apply"], kill_third)) == KILLED
        assert read_tree(self.tree) not in self.contents.values()

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


Trap = Callable[[Lab, int, Callable[[], object]], None]
HALF = "a half patched tree"
CASES = [("revert", "apply"), ("apply", "revert"), ("apply", "apply later"), (HALF, "apply"), (HALF, "apply later")]
EVERYWHERE = pytest.mark.parametrize(("start", "stopped"), CASES)


def _stop_everywhere(
    scratch: Path, start: str, stopped: str, trap: Trap, stop: Callable[[], object]
) -> Iterator[tuple[Lab, int, int]]:
    """A fresh lab set to `start`, then `stopped` at its point 1, 2, 3 ... to the last: lab, point, exit code."""
    for at in range(1, 10_000):
        lab = Lab(scratch / str(at))
        lab.start(start)
        code = _wait(run_child(lab.operations[stopped], partial(trap, lab, at, stop)))
        if not lab.reached.exists():
            print(f"{stopped}: stopped at {at - 1} points")
            assert code == FINISHED
            assert at > 20  # there were points to stop at
            return
        yield lab, at, code
        shutil.rmtree(scratch / str(at))


@pytest.fixture
def scratch(tmp_path):
    """In memory where possible: these tests sync a few thousand times, which tells a killed process nothing."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.parametrize("trap", [_trap_changes, pytest.param(_trap_lines, marks=pytest.mark.long)])
@EVERYWHERE
def test_killed_everywhere(scratch, start, stopped, trap):
    """The next run, whichever it is, makes the tree whole."""
    for lab, at, code in _stop_everywhere(scratch, start, stopped, trap, _kill):
        assert code == KILLED
        lab.check()
        lab.finish(list(lab.operations)[at % 3])


@EVERYWHERE
def test_a_disk_error_everywhere(scratch, start, stopped):
    """An error is not a kill: apply on a pristine tree takes everything back itself, or was not hindered."""
    for lab, at, code in _stop_everywhere(scratch, start, stopped, _trap_changes, _fail):
        lab.check()
        if code == FINISHED:  # the error was of no consequence: making a directory that exists
            assert read_tree(lab.tree) == lab.contents[stopped]
        elif start == "revert":
            assert (read_tree(lab.tree), read_modes(lab.tree)) == (FILES, lab.modes)
        lab.finish(list(lab.operations)[at % 3])
