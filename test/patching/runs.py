"""Runs of the patch engine: in a child process, or refused; and what a tree has after them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_xshare.patching import PatchError


def read_tree(root: Path) -> dict[str, bytes]:
    """Every file below `root` but the engine's own store."""
    files = (file for file in root.rglob("*") if file.is_file() and ".xshare" not in file.parts)
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


def read_modes(root: Path) -> dict[str, int]:
    """Mode bits of every file and directory below `root`, the engine's store included."""
    return {str(file.relative_to(root)): file.lstat().st_mode for file in root.rglob("*")}


def run_child(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> int:
    """Run `work` in a forked process; returns its pid. It ends with code 0, or 1 where `work` raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            before()
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def refused(work: Callable[[], object], tree: Path) -> str:
    """The line `work` is refused with; nothing in the tree changes."""
    before, modes = read_tree(tree), read_modes(tree)
    with pytest.raises(PatchError) as refusal:
        work()
    assert (read_tree(tree), read_modes(tree)) == (before, modes)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)
