"""The real queue on every release it supports: applied, proved, reverted to what the wheel's own RECORD says."""

import base64
import hashlib
import importlib.metadata
import os
import py_compile
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from benchmark.common.paths import RELEASES
from scripts.fetch_release import fetch_release
from scripts.patch_lint import lint
from sglang_xshare.patching import PatchError, apply, check_patched, revert
from sglang_xshare.patching.queue import find_root, list_releases, load_queue
from sglang_xshare.patching.state import STORE

ROOT = find_root()


EVERYWHERE = ("0.5.17", "0.5.21", "0.5.23")  # the releases that every test runs on; the others take a download
BETWEEN = [version for version in list_releases(ROOT) if version not in EVERYWHERE]


@pytest.fixture(params=[*EVERYWHERE, *(pytest.param(version, marks=pytest.mark.long) for version in BETWEEN)])
def release(request):
    """A release and a copy of it. Linked, not copied: were the engine to write into a file, every copy would change."""
    version: str = request.param
    source = fetch_release(version)
    with tempfile.TemporaryDirectory(dir=RELEASES.parent) as scratch:
        shutil.copytree(source, Path(scratch) / "tree", copy_function=os.link)
        yield version, Path(scratch) / "tree"


def _differing(tree: Path) -> set[str]:
    """Files that are not as the wheel recorded them: changed, missing, or extra. Bytecode comes and goes with use."""
    (distribution,) = importlib.metadata.distributions(name="sglang", path=[str(tree)])
    recorded = {str(file): file.hash for file in distribution.files or ()}
    found = {str(file.relative_to(tree)): file for file in tree.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert len(recorded) > 2000
    paths = recorded.keys() | found.keys()
    return {path for path in paths if not _agrees(found.get(path), recorded.get(path, "extra"))}


def _agrees(file: Path | None, recorded: object) -> bool:
    if file is None or recorded == "extra":
        return False
    if recorded is None:  # RECORD itself
        return True
    assert isinstance(recorded, importlib.metadata.FileHash)
    digest = hashlib.new(recorded.mode, file.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=") == recorded.value


def test_apply_and_revert(release):
    version, tree = release
    assert _differing(tree) == set()
    assert "nothing to do" not in apply(tree)
    check_patched(tree)
    queue = load_queue(ROOT, version)
    changed = {path for path in _differing(tree) if not path.startswith(STORE)}
    assert changed == set(queue.hashes) == {file.path for patch in queue.patches for file in patch.files}
    for path in (path for path in changed if path.endswith(".py")):
        py_compile.compile(str(tree / path), doraise=True, cfile=str(tree / "x.pyc"))
    (tree / "x.pyc").unlink()
    assert "nothing to do" in apply(tree)
    assert "nothing to do" not in revert(tree)
    assert _differing(tree) == set()
    with pytest.raises(PatchError, match="is not patched"):
        check_patched(tree)
    assert _differing(RELEASES / version) == set()


@pytest.mark.parametrize("versions", [EVERYWHERE, pytest.param(BETWEEN, marks=pytest.mark.long)])
def test_the_queue_passes_its_lint(versions):
    for version in versions:
        fetch_release(version)
    report = lint(ROOT, RELEASES)
    assert report.errors == []
    assert set(report.unproved).isdisjoint(versions)
    assert min(report.proved[version] for version in versions) > 10


def test_a_fetched_release_is_not_fetched_again(monkeypatch):
    fetch_release("0.5.23")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("downloaded again"))
    assert (fetch_release("0.5.23") / "sglang/__init__.py").is_file()


def test_a_release_that_does_not_exist_leaves_nothing(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        fetch_release("0.0.0", tmp_path)
    assert list(tmp_path.iterdir()) == []
