"""The file that the controller of replicas listens at: this user's alone, short enough, and gone afterwards."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import pytest

from sglang_xshare.affinity.finished import open_receiver, open_sender
from sglang_xshare.affinity.socket_file import LONGEST, NAME, PREFIX, SETTLED, find_path, remove, remove_dead, sweep

RUN = """
import os, signal, sys
from multiprocessing import util
from sglang_xshare.affinity.finished import open_receiver, open_sender
receive, tell = open_receiver(sys.argv[1]), open_sender(sys.argv[1])
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def tmp_path():
    """A folder whose path is short: pytest's own is too long for a socket under xdist."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def instance(tmp_path, monkeypatch):
    """A server's instance, whose temporary directory is the test's."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return uuid4().hex[:12]


@pytest.fixture
def listener(instance):
    """A process of another server listens at `find_path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as found:
        found.bind(str(find_path(instance)))
        found.listen(1)
        yield found


def make_old(folder: Path) -> None:
    os.utime(folder, (time.time() - 2 * SETTLED,) * 2)


def run(instance: str, end: str) -> None:
    subprocess.run([sys.executable, "-c", RUN, instance, end], check=end == "ended", capture_output=True, text=True)


def test_no_other_user_reaches_the_socket(instance, monkeypatch):
    """Whatever the umask. An abstract socket, in no file, has no permissions."""
    before = os.umask(0)
    try:
        receive = open_receiver(instance)
    finally:
        os.umask(before)
    path = find_path(instance)
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent)] == [0o600, 0o700]
    sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if instance in line]
    assert sockets
    assert all(line.endswith(f" {path}") for line in sockets)
    send = open_sender(instance)  # held: a collected socket drops what it has not sent yet
    send("mine")
    deadline = time.monotonic() + 20
    heard: list[str] = []
    while not heard and time.monotonic() < deadline:
        heard += receive()
    assert heard == ["mine"]


@pytest.mark.parametrize("harm", ["open to others", "a link", "a file", "another user's"])
def test_a_folder_that_is_not_this_users_alone_is_refused(instance, harm, tmp_path, monkeypatch):
    folder = find_path(instance).parent
    if harm == "open to others":
        folder.chmod(0o750)
    elif harm == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    else:
        folder.rmdir()
        private = tmp_path / "private"
        private.mkdir(mode=0o700)
        folder.symlink_to(private) if harm == "a link" else folder.write_text("")
    for opened in (open_receiver, open_sender):
        with pytest.raises(OSError, match=str(folder)) as error:
            opened(instance)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("spare", [0, 1])
def test_a_path_too_long_for_a_socket_lies_below_tmp(instance, spare, tmp_path, monkeypatch):
    """The longest path that fits, and one byte more."""
    tail = len(os.fsencode(f"/{PREFIX}{instance}/{NAME}"))
    folder = tmp_path / ("x" * (LONGEST - tail - len(os.fsencode(tmp_path)) - 1 + spare))
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    path = find_path(instance)
    try:
        assert path.parent.parent == (Path("/tmp") if spare else folder)
        with socket.socket(socket.AF_UNIX) as found:
            found.bind(str(path))
    finally:
        remove(path)


def test_a_process_that_ends_removes_it(instance):
    run(instance, "ended")
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


def test_the_next_server_removes_what_a_killed_one_has_left(instance):
    run(instance, "killed")
    left = find_path(instance)
    assert left.exists()
    other = uuid4().hex[:12]
    open_receiver(other)
    assert left.exists()  # so young that its server may be about to listen
    make_old(left.parent)
    sweep(Path(tempfile.gettempdir()))
    assert [one.name for one in Path(tempfile.gettempdir()).iterdir()] == [f"{PREFIX}{other}"]


@pytest.mark.parametrize("why", ["a process listens", "others may enter", "somebody has put something there"])
def test_what_is_not_swept(instance, why, request):
    path = find_path(instance)
    if why == "a process listens":
        request.getfixturevalue("listener")
    elif why == "others may enter":
        path.parent.chmod(0o755)
    else:
        (path.parent / "notes").write_text("mine")
    make_old(path.parent)
    for _ in range(4):  # a full queue of a listener too
        sweep(path.parent.parent)
    assert path.parent.exists()
    remove_dead(path)
    assert path.exists() == (why == "a process listens")
