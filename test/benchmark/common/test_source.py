"""What is told of the source: its commit, and whether it is still that of another one; records and pages aside."""

import shutil
import subprocess

import pytest

from benchmark.common import source


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A committed checkout of a few files; returns its folder and a function that runs git there."""
    monkeypatch.setattr(source, "ROOT", tmp_path)

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    names = ("python/a.py", "patches/a.patch", "benchmark/results/b.json", "benchmark/README.md", "test/test_a.py")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path, git


def test_a_clean_commit(checkout):
    commit = source.describe_commit()
    assert len(commit) == 12
    assert source.list_changes() == []
    assert source.is_unchanged_since(commit)


def test_changes_since_a_commit(checkout):
    folder, git = checkout
    commit = source.describe_commit()
    assert source.has_history()
    assert source.count_changes(commit, ("python", "benchmark")) == (0, [])
    for name in ("python/a.py", "test/test_a.py", "benchmark/README.md", "benchmark/results/b.json"):
        (folder / name).write_text("second")
    git("commit", "-a", "-m", "second")
    source.count_changes.cache_clear()
    assert source.count_changes(commit, ("python", "benchmark")) == (1, ["python/a.py"])
    assert source.count_changes(commit, ("patches",)) == (0, [])
    assert source.count_changes("0123456789ab", ("python",)) is None
    shutil.rmtree(folder / ".git")
    assert not source.has_history()


@pytest.mark.parametrize("name", ["benchmark/results/b.json", "benchmark/README.md", "test/test_a.py", "notes"])
def test_records_pages_and_tests_are_no_source(checkout, name):
    folder, git = checkout
    commit = source.describe_commit()
    (folder / name).write_text("second")
    assert source.describe_commit() == commit
    git("add", ".")
    git("commit", "-m", "second")
    assert source.describe_commit() != commit
    assert source.is_unchanged_since(commit)


@pytest.mark.parametrize("name", ["python/a.py", "python/new.py", "benchmark/new.py", "patches/a.patch"])
def test_a_change_is_told(checkout, name):
    folder, git = checkout
    commit = source.describe_commit()
    (folder / name).write_text("second")
    assert source.list_changes() == [name]
    assert source.describe_commit() == f"{commit}-dirty"
    assert not source.is_unchanged_since(commit)
    git("add", ".")
    git("commit", "-m", "second")
    assert source.list_changes() == []
    assert not source.is_unchanged_since(commit)


def carried(folder, tmp_path_factory, monkeypatch):
    """A machine that was sent the files of a checkout, those that git ignores too, and not git's own."""
    machine = tmp_path_factory.mktemp("machine") / "checkout"
    shutil.copytree(folder, machine, ignore=shutil.ignore_patterns(".git"))
    monkeypatch.setattr(source, "ROOT", machine)
    return machine


def test_git_may_know_an_older_commit_than_the_source_is(checkout):
    """Where a checkout has travelled with a git of its own."""
    folder, git = checkout
    (folder / "python" / "a.py").write_text("second")
    git("commit", "-a", "-m", "second")
    commit = source.describe_commit()
    source.carry()
    git("reset", "--soft", "HEAD~1")
    assert source.list_changes() == ["python/a.py"]
    assert source.describe_commit() == commit
    (folder / "python" / "b.py").write_text("new")
    older = source.describe_commit()
    assert older != f"{commit}-dirty"
    assert older.endswith("-dirty")
    (folder / "python" / "b.py").unlink()
    assert source.describe_commit() == commit
    (folder / "python" / "a.py").write_text("third")
    assert source.describe_commit() == older


def test_the_commit_travels(checkout, tmp_path_factory, monkeypatch):
    commit = source.describe_commit()
    source.carry()
    machine = carried(checkout[0], tmp_path_factory, monkeypatch)
    assert source.describe_commit() == commit
    (machine / "benchmark" / "README.md").write_text("second")
    (machine / source.KERNEL_SHAPES).parent.mkdir(parents=True)
    (machine / source.KERNEL_SHAPES).write_text("measured there")
    assert source.describe_commit() == commit
    (machine / "python" / "a.py").write_text("second")
    assert source.describe_commit() == f"{commit}-dirty"
    (machine / "python" / "a.py").unlink()
    assert source.describe_commit() == f"{commit}-dirty"
    with pytest.raises(RuntimeError, match="must be a checkout of git"):
        source.carry()
