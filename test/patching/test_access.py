"""Modes and owners of what a patch run writes: any umask, any owner of the tree, a server of another user."""

import errno
import os
import py_compile
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from patching.fake import FILES, PATCHED, write_queue, write_tree
from patching.runs import read_modes, read_tree, run_child
from sglang_xshare.patching import PatchError, apply, check_patched, revert
from sglang_xshare.patching.state import STORE

NOBODY = 65534


@pytest.fixture
def public():
    """A folder that every user may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def _with_umask(mask: int, tree: Path, queue: Path) -> None:
    former = os.umask(mask)
    try:
        apply(tree, queue)
    finally:
        os.umask(former)


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777])
@pytest.mark.parametrize("folder", [0o755, 0o2775, 0o750])
def test_the_store_has_the_modes_of_the_tree_whatever_the_umask(tree, queue, mask, folder):
    (tree / "sglang").chmod(folder)
    _with_umask(mask, tree, queue)
    found = [tree / STORE, *(tree / STORE).rglob("*")]
    modes = {stat.S_IMODE(file.stat().st_mode) for file in found if file.is_dir()}
    assert modes == {folder}
    assert {stat.S_IMODE(file.stat().st_mode) for file in found if file.is_file()} == {folder & 0o666}


def _as_another_user(work: Any) -> str:
    """Return the PatchError of `work` in a process of another user; the tests' own user where it is not root."""
    read, write = os.pipe()

    def report() -> None:
        try:
            work()
        except PatchError as error:
            os.write(write, str(error).encode())

    pid = run_child(report, before=lambda: os.setuid(NOBODY) if os.getuid() == 0 else None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0  # 1: another error, a traceback for a server
    os.close(write)
    with open(read, "rb") as stream:
        return stream.read().decode()


def test_a_server_of_another_user_reads_a_tree_that_was_patched_with_a_narrow_umask(public):
    tree, queue = write_tree(public / "tree"), write_queue(public / "queue")
    for folder in [tree, *tree.rglob("*/")]:
        folder.chmod(0o755)
    _with_umask(0o077, tree, queue)
    assert _as_another_user(lambda: check_patched(tree, queue)) == ""


@pytest.mark.parametrize("hidden", [STORE, f"{STORE}/state.json", "sglang/srt/route.py"])
def test_a_file_that_the_server_may_not_read_is_one_line(public, hidden):
    tree, queue = write_tree(public / "tree"), write_queue(public / "queue")
    apply(tree, queue)
    (tree / hidden).chmod(0)
    line = _as_another_user(lambda: check_patched(tree, queue))
    (tree / hidden).chmod(0o755)
    assert line.startswith(f"{tree / hidden}")
    assert "Permission denied; a server's user must be able to read the tree" in line
    assert "\n" not in line


@pytest.mark.parametrize("group_too", [False, True])
def test_a_user_who_may_write_the_tree_but_does_not_own_it_patches(tree, queue, monkeypatch, group_too):
    """The kernel lets nobody but root give a file away, and only a user's own groups be given."""
    modes, given = read_modes(tree), []

    def chown(file, owner, group):
        if owner != -1 or group_too:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(file))
        given.append(group)

    monkeypatch.setattr(os, "chown", chown)
    apply(tree, queue)
    assert read_tree(tree) == PATCHED
    assert set(given) == (set() if group_too else {(tree / "sglang").stat().st_gid})
    revert(tree)
    assert (read_tree(tree), read_modes(tree)) == (FILES, modes)


def test_a_user_who_may_write_the_tree_reverts_what_another_user_has_patched(tree, queue, monkeypatch):
    """The kernel lets only a file's owner and root set its mode and times."""
    modes = read_modes(tree)
    apply(tree, queue)
    theirs = {file.stat().st_ino for file in tree.rglob("*")}
    held = [file.open("rb") for file in tree.rglob("*") if file.is_file()]  # else a new file may get the number of one

    def guard(function: Any) -> Any:
        def call(file: Path, *arguments: Any, **options: Any) -> None:
            if file.stat().st_ino in theirs:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(file))
            function(file, *arguments, **options)

        return call

    for name in ("chmod", "utime"):
        monkeypatch.setattr(os, name, guard(getattr(os, name)))
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    revert(tree)
    for file in held:
        file.close()
    assert (read_tree(tree), read_modes(tree)) == (FILES, modes)


def test_python_runs_no_unchecked_bytecode_of_another_content(tree, queue):
    """PEP 552: Python never compares an unchecked-hash .pyc, as uv, Nix and some images make, with its source."""
    file = tree / "sglang/srt/dos.py"
    sizes = []
    for step in (lambda: apply(tree, queue), lambda: revert(tree)):
        for level in (0, 1):
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(file), doraise=True, optimize=level, invalidation_mode=mode)
        step()
        for flags in ([], ["-O"]):
            command = [sys.executable, *flags, "-c", "from sglang.srt import dos; print(dos.SIZE)"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=tree, check=True)
            sizes.append(int(done.stdout))
    assert sizes == [2, 2, 1, 1]
