"""The commit of the source code that was measured. Records and Markdown pages do not count as source code."""

import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path

from benchmark.common.paths import ROOT

KERNEL_SHAPES = "python/sglang_xshare/selection/triton_kernel/shapes.json"
"""A GPU run writes this file from its own measurements. The run's record contains the same measurements."""
SOURCE = (
    # The package contains a symbolic link to `patches`. Git does not follow links, so `patches` is listed here.
    *("python", "patches", "sgl-kernel", "benchmark", "checkpoints", "training", "scripts"),
    *(":(exclude)benchmark/results", ":(exclude,glob)**/*.md", f":(exclude){KERNEL_SHAPES}"),
)
"""The files that can change a measurement, as path specifications for git."""
CARRIED = Path(".gpu", "commit")
DIRTY = "-dirty"


def describe_commit() -> str | None:
    """Return the 12-digit commit of this checkout, with the suffix "-dirty" if the source code differs from it.

    Return None if neither git nor the file that `carry` writes can provide the commit.
    """
    carried = _read_carried()
    if carried and not carried.endswith(DIRTY):
        return carried
    return _describe_git() or carried


def carry() -> None:
    """Write the commit and the checksums of all source files to .gpu/commit.

    A copy of the checkout without git can then still report its commit. Raises RuntimeError if git cannot be used.
    """
    commit = _describe_git()
    files = _git("ls-files", "--", *SOURCE)
    if commit is None or files is None:
        raise RuntimeError(f"{ROOT} must be a checkout of git, whose commit can be carried")
    lines = [commit, *(f"{_sum(ROOT / name)}  {name}" for name in files.splitlines())]
    (ROOT / CARRIED).parent.mkdir(exist_ok=True)
    (ROOT / CARRIED).write_text("\n".join(lines) + "\n")


def _describe_git() -> str | None:
    commit = _git("rev-parse", "--short=12", "HEAD")
    return commit and commit + (DIRTY if list_changes() else "")


def _read_carried() -> str | None:
    """Return the commit from .gpu/commit, with the suffix "-dirty" if a source file has changed.

    Return None if the file does not exist.
    """
    if not (ROOT / CARRIED).exists():
        return None
    commit, *lines = (ROOT / CARRIED).read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    added = set((_git("ls-files", "-co", "--exclude-standard", "--", *SOURCE) or "").splitlines()) - set(sums)
    same = not added and all(_sum(ROOT / name) == digest for name, digest in sums.items())
    return commit if same or commit.endswith(DIRTY) else commit + DIRTY


def _sum(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"


def list_changes() -> list[str]:
    """Return the source files that differ from the current commit, including new files."""
    return [line[3:] for line in (_git("status", "--porcelain", "--", *SOURCE) or "").splitlines()]


def is_unchanged_since(commit: str) -> bool:
    """Return whether the source is the same as in `commit`. Return False if git does not have the commit."""
    return _git("diff", "--name-only", commit, "--", *SOURCE) == "" and not list_changes()


def has_history() -> bool:
    """Return whether this checkout contains earlier commits. A shallow clone does not."""
    return _git("rev-parse", "--is-shallow-repository") == "false"


@cache
def count_changes(commit: str, paths: tuple[str, ...]) -> tuple[int, list[str]] | None:
    """Return the number of commits that changed these paths after `commit`, and the files that differ from it now.

    Pages and results are ignored. Return None if git does not have the commit.
    """
    excluded = [path for path in SOURCE if path.startswith(":(exclude")]
    files = _git("diff", "--name-only", commit, "HEAD", "--", *paths, *excluded)
    count = _git("rev-list", "--count", f"{commit}..HEAD", "--", *paths, *excluded)
    return None if files is None or count is None else (int(count), files.splitlines())


def _git(*arguments: str) -> str | None:
    """Run git and return its output. Return None if git fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None
