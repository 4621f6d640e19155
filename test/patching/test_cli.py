"""The command line: one line for each refusal, exit code 1, no traceback, nothing changed."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import Mock

import pytest

from patching.fake import FILES, LATER_QUEUE, PATCHED, RELEASE, write_queue
from patching.runs import read_tree
from refused import read_refusal
from sglang_xshare.cli import main
from sglang_xshare.patching import engine


@pytest.fixture(autouse=True)
def _our_queue(queue, monkeypatch):
    monkeypatch.setattr(engine, "find_root", lambda: queue)


def _patch(*words: object) -> int:
    return main(["patch", *map(str, words)])


def _refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert _patch(*words) == 1
    line = read_refusal(capsys)
    assert line.startswith(f"patch {words[0]}: ")
    return line.strip()


def test_a_round_trip(tree, capsys):
    for command, content, says in [
        ("status", FILES, "not patched"),
        ("apply", PATCHED, "3 patches applied to 4 files"),
        ("apply", PATCHED, "already patched, nothing to do"),
        ("status", PATCHED, "patched, 4 files"),
        ("revert", FILES, "4 files reverted"),
        ("revert", FILES, "not patched, nothing to do"),
    ]:
        assert _patch(command, "--target", tree) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith(f"patch {command}: SGLang {RELEASE} in {tree}: ")
        assert says in captured.out
        assert captured.err == ""
        assert read_tree(tree) == content


def test_a_target_that_is_none(tmp_path, capsys):
    (tmp_path / "file").touch()
    for command in ("apply", "revert", "status"):
        for target in (tmp_path / "missing", tmp_path / "file", tmp_path):
            said = _refusal(capsys, command, "--target", target)
            assert said.startswith(f"patch {command}: --target {target}: must be a directory that contains sglang/")
        with pytest.raises(SystemExit):
            _patch(command, "--target", "")
        assert capsys.readouterr().err == f"patch {command}: --target empty: must be a path\n"


def test_no_sglang_installed(capsys, monkeypatch):
    for spec in (None, SimpleNamespace(origin=None)):  # the latter of a folder of this name
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        assert "sglang is not installed here" in _refusal(capsys, "apply")


def test_the_default_target_is_the_installed_sglang(tree, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(tree))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    assert _patch("apply") == 0
    assert f"in {tree}: 3 patches" in capsys.readouterr().out
    assert "sglang" not in sys.modules


def test_status_is_1_where_attention_is_needed(tree, capsys):
    _patch("apply", "--target", tree)
    capsys.readouterr()
    (tree / "sglang/srt/dos.py").write_bytes(FILES["sglang/srt/dos.py"])
    assert "is half patched by an interrupted run" in _refusal(capsys, "status", "--target", tree)
    (tree / "sglang/srt/dos.py").write_bytes(b"")
    assert "sglang/srt/dos.py: edited after it was patched" in _refusal(capsys, "status", "--target", tree)
    (tree / "sglang/_version.py").write_text("__version__ = '0.6'\n")
    assert f"SGLang 0.6 is not supported; supported: {RELEASE}" in _refusal(capsys, "status", "--target", tree)


def test_a_reader_that_leaves_early_is_no_error(tree):
    """As in `patch status | head -1`: it ends as the signal would have ended it, and says nothing."""
    command = [sys.executable, "-m", "sglang_xshare", "patch", "revert", "--target", str(tree)]
    environment = os.environ | {"PYTHONUNBUFFERED": ""}  # with it, Python has nothing left to flush at its end
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as revert:
        assert revert.stdout is not None
        assert revert.stderr is not None
        revert.stdout.close()
        assert revert.stderr.read() == b""
        assert revert.wait() == 141


def _open_read_only(file: object, mode: str = "r", *args: Any, _open: Callable[..., IO[Any]] = open) -> IO[Any]:
    """Fail as `open` does on a read-only file system, because mode bits do not stop root."""
    if set(mode) & set("w+ax"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))
    return _open(file, mode, *args)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "{tree}: No space left on device"),  # it names no file
        (OSError(errno.EACCES, "Permission denied", "route.py"), "route.py: Permission denied"),
        (ModuleNotFoundError("No module named 'unidiff'"), "No module named 'unidiff'; pip install it"),
    ],
    ids=["full disk", "a file", "not installed"],
)
def test_what_the_system_lacks_is_named(tree, capsys, monkeypatch, error, line):
    monkeypatch.setattr("sglang_xshare.patching.cli.apply", Mock(side_effect=error))
    assert _patch("apply", "--target", tree) == 1
    assert capsys.readouterr().err == f"patch apply: {line.format(tree=tree)}\n"


@pytest.mark.parametrize("patched", [False, True])
def test_a_read_only_tree(tree, capsys, monkeypatch, patched):
    if patched:
        _patch("apply", "--target", tree)
        capsys.readouterr()
    changing, idle = ("revert", "apply") if patched else ("apply", "revert")
    before = read_tree(tree)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", _open_read_only)
        line = _refusal(capsys, changing, "--target", tree)
        assert _patch(idle, "--target", tree) == 0  # there is nothing to change
    assert read_tree(tree) == before
    assert line.startswith(f"patch {changing}: {tree}: ")
    assert "may write" in line


@pytest.mark.parametrize("former", [False, True])
def test_an_interrupted_apply_is_one_line_and_130(tree, tmp_path, capsys, monkeypatch, former):
    """Ctrl-C once the first file is in its place; a former version of the queue is then taken back, not put back."""
    if former:
        engine.apply(tree, write_queue(tmp_path / "former", LATER_QUEUE))
    replace_file, interrupts = engine.replace_file, iter([KeyboardInterrupt])

    def replace(new: Path, old: Path) -> None:
        replace_file(new, old)
        if new.suffix == ".patched" and (interrupt := next(interrupts, None)):
            raise interrupt

    monkeypatch.setattr(engine, "replace_file", replace)
    assert _patch("apply", "--target", tree) == 130
    captured = capsys.readouterr()
    outcome = "the tree is not patched now" if former else "nothing changed"
    assert (captured.out, captured.err) == ("", f"patch apply: interrupted; {outcome}\n")
    assert read_tree(tree) == FILES
