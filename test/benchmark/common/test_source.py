"""The source that figures name: its commit, and whether it still is that of a record; records and pages aside."""

import shutil
import subprocess

import pytest

from benchmark.common import source
from benchmark.common.record import Record
from benchmark.records import history
from benchmark.records.experiments import EXPERIMENTS

IRRELEVANT = ("benchmark/results/b.json", "benchmark/README.md", "test/test_a.py")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A committed checkout of a few files: its folder, and a function that writes files and commits them."""
    monkeypatch.setattr(source, "ROOT", tmp_path)

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(text, *names):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        git("add", ".")
        git("commit", "-m", text)

    git("init")
    commit("first", "python/a.py", "patches/a.patch", *IRRELEVANT)
    return tmp_path, commit


@pytest.mark.parametrize(
    ("name", "is_source"),
    [
        *((name, False) for name in (source.KERNEL_SHAPES, *IRRELEVANT)),
        *((name, True) for name in ("python/a.py", "python/new.py", "benchmark/new.py", "patches/a.patch")),
    ],
)
def test_a_change_counts_where_it_decides_a_figure(checkout, name, is_source):
    folder, commit = checkout
    first = source.describe_commit()
    assert len(first) == 12
    assert source.is_unchanged_since(first)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("second")
    assert source.list_changes() == [name] * is_source
    assert source.describe_commit() == first + "-dirty" * is_source
    assert source.is_unchanged_since(first) != is_source
    commit("second")
    assert source.list_changes() == []
    assert source.describe_commit() not in (first, f"{first}-dirty")
    assert source.is_unchanged_since(first) != is_source


def test_changes_since_a_record_are_counted_by_its_paths(checkout, tmp_path_factory):
    """A record of serving depends on the package, and one of an unknown commit is named."""
    (folder, commit), results = checkout, tmp_path_factory.mktemp("results")
    serving, first = EXPERIMENTS["serving"].path(results), source.describe_commit()
    Record(serving.parent, serving.stem, []).add("point")

    def list_stale():
        source.count_changes.cache_clear()
        return [line for line in history.list_stale(results) if "never recorded" not in line]

    commit("second", "python/a.py", source.KERNEL_SHAPES, *IRRELEVANT)
    assert list_stale() == []
    commit("third", "python/sglang_xshare/a.py", *IRRELEVANT)
    commit("fourth", "python/sglang_xshare/stage/b.py", "python/sglang_xshare/stage/c.py")
    folders = "python/sglang_xshare/stage (2), python/sglang_xshare/a.py (1)"
    changes = f"of {first}; 2 commits since, 3 files differ: {folders}"
    assert list_stale() == [f"serving: {changes}"]
    text = serving.read_text()
    serving.write_text(text.replace(first, f"{first}-dirty"))
    assert list_stale() == [f"serving: {changes}"]
    serving.write_text(text.replace(first, "0123456789ab"))
    assert list_stale() == ["serving: its commit 0123456789ab is not in this checkout"]
    shutil.rmtree(folder / ".git")
    assert list_stale() == ["records: this checkout has no history, so changes since each record are unknown"]


def test_the_commit_travels_with_files_alone_and_beside_another_git(checkout, tmp_path_factory, monkeypatch):
    folder, commit = checkout
    commit("second", "python/a.py")
    told = source.describe_commit()
    source.carry()
    machine = tmp_path_factory.mktemp("machine") / "checkout"
    shutil.copytree(folder, machine, ignore=shutil.ignore_patterns(".git"))
    subprocess.run(["git", "reset", "--soft", "HEAD~1"], cwd=folder, check=True)
    assert source.list_changes() == ["python/a.py"]
    assert source.describe_commit() == told, "git has an older commit than the files"
    (folder / "python" / "new.py").write_text("new")
    assert source.describe_commit() not in (told, f"{told}-dirty")
    monkeypatch.setattr(source, "ROOT", machine)
    (machine / "benchmark" / "README.md").write_text("second")
    (machine / source.KERNEL_SHAPES).parent.mkdir(parents=True)
    (machine / source.KERNEL_SHAPES).write_text("measured there")
    assert source.describe_commit() == told
    (machine / "python" / "a.py").write_text("third")
    assert source.describe_commit() == f"{told}-dirty"
    (machine / "python" / "a.py").unlink()
    assert source.describe_commit() == f"{told}-dirty"
    with pytest.raises(RuntimeError, match="must be a checkout of git"):
        source.carry()
