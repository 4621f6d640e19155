"""Fixtures that several folders share: checkpoints, release trees, and running servers, which are dear."""

import os
import re
import shutil
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from benchmark.common.paths import BUILD, ROOT
from benchmark.common.server import Server
from scripts.fetch_release import fetch_release
from sglang_xshare.patching.engine import apply
from sglang_xshare.patching.queue import find_root, read_digest
from sglang_xshare.patching.state import read
from sglang_xshare.patching.tree import find_tree

PATCHED = BUILD / "releases-patched"


# Of `make test`: the same examples every time, so that one in a million does not stop somebody else's change. All other
# runs, `make test-long` among them, draw new ones. No example has a deadline: the machine may be busy.
settings.register_profile("drawn", deadline=None)
settings.load_profile("drawn")
settings.register_profile("fixed", derandomize=True, deadline=None)
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers; tables are as wide as it says
# A shell that runs a command in the background has it ignore SIGINT, and so would every program that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


KNOWN_SKIPS = re.compile(
    "needs an NVIDIA GPU|there is a GPU: |this machine has a GPU|needs an installed SGLang|no C\\+\\+ compiler here"
    "|promtool, a program|prometheus is not installed|served from 0.5.23 on|SGLang pages experts from"
)
"""Why a test may be skipped. Any other reason fails the run: tests that are skipped unseen guard nothing."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that skips a test for an unknown reason. `-ra` prints all of them."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):  # a worker of xdist reports to its controller
        return
    reasons = {report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", [])}
    if unknown := sorted(reason for reason in reasons if not KNOWN_SKIPS.match(reason)):
        reporter.write_line(f"\ntest/conftest.py, KNOWN_SKIPS: skipped for an unknown reason: {'; '.join(unknown)}")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


class ServerPool:
    """Running servers by what they were asked for; beyond `size` the one longest unused is stopped."""

    def __init__(self, model: Path, size: int = 2) -> None:
        self.model = model
        self.size = size
        self._servers: OrderedDict[tuple[object, ...], Server] = OrderedDict()

    def __call__(self, *args: str, release: Path | None = None) -> Server:
        """A running server with these flags; `release` is a tree of `patched_release` or `pristine_release`."""
        if release is None:
            _check_installed()
        key = (release, *args)
        if key not in self._servers:
            while len(self._servers) >= self.size:
                self._servers.popitem(last=False)[1].stop()
            server = Server(self.model, ["--enable-metrics", *args], release=release, name="test")
            server.start()
            server.wait()
            self._servers[key] = server
        self._servers.move_to_end(key)
        return self._servers[key]

    def stop(self) -> None:
        """Stop all of them."""
        while self._servers:
            self._servers.popitem()[1].stop()


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The small trained checkpoint: 64 experts, top-8, 4 layers."""
    return ROOT / "checkpoints" / "qwen3-moe-tiny"


@pytest.fixture(scope="session")
def servers(tiny_model: Path) -> Iterator[ServerPool]:
    """Call it with server flags for a running server of the small checkpoint, shared by all tests of the run."""
    pool = ServerPool(tiny_model)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def pristine_release() -> Callable[[str], Path]:
    """Call it with a version for the unpacked release as it was published; never write to it."""
    return _fetch_release


@pytest.fixture(scope="session")
def patched_release() -> Callable[[str], Path]:
    """Call it with a version for a copy of that release, patched by our queue."""
    return _patch_release


@cache
def _check_installed() -> None:
    """Fail unless the installed SGLang has the patches of this checkout: a server would run the code of others."""
    tree = find_tree(None)
    if read(tree).queue != read_digest(find_root(), tree.release):
        pytest.fail(f"{tree.root}: SGLang {tree.release} lacks this checkout's patches: run make patch", pytrace=False)


def _lock() -> FileLock:
    """Held by the worker that makes a tree, while the other one waits for it."""
    BUILD.mkdir(exist_ok=True)
    return FileLock(BUILD / "releases.lock")


@cache
def _fetch_release(version: str) -> Path:
    with _lock():
        return fetch_release(version)


@cache
def _patch_release(version: str) -> Path:
    tree = PATCHED / version
    pristine = _fetch_release(version)
    with _lock():
        if not tree.is_dir():
            half = PATCHED / f".{version}"
            shutil.rmtree(half, ignore_errors=True)
            # Links are enough: the engine moves new files into place and never writes into one.
            shutil.copytree(pristine, half, copy_function=os.link)
            half.rename(tree)
        apply(tree)
    return tree
