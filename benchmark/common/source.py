"""The source that a figure was measured with. Records and pages come later, and are no part of the source."""

import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path

from benchmark.common.paths import ROOT

KERNEL_SHAPES = "python/sglang_xshare/selection/triton_kernel/shapes.json"
"""A run on a GPU rewrites this file by its own measurements, which its record holds."""
SOURCE = (
    # The package holds a link to the patches, which git does not follow.
    *("python", "patches", "sgl-kernel", "benchmark", "checkpoints", "training", "scripts"),
    *(":(exclude)benchmark/results", ":(exclude,glob)**/*.md", f":(exclude){KERNEL_SHAPES}"),
)
"""The files that decide a figure, as path specifications of git."""
CARRIED = Path(".gpu", "commit")
DIRTY = "-dirty"


def describe_commit() -> str | None:
    """Return the commit in 12 digits, "-dirty" if the source differs; None without `carry`'s sums and without git."""
    carried = _read_carried()
    if carried and not carried.endswith(DIRTY):
        return carried
    return _describe_git() or carried


def carry() -> None:
    """Write the commit and its files' sums to .gpu/commit, which travels alone. Raises RuntimeError without git."""
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
    """Return the carried commit, with "-dirty" if a file has changed since; None without a carried commit."""
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
    """Return the files of the source that differ from the commit, new ones included."""
    return [line[3:] for line in (_git("status", "--porcelain", "--", *SOURCE) or "").splitlines()]


def is_unchanged_since(commit: str) -> bool:
    """Return whether the source is that of `commit`; False if this checkout does not have the commit."""
    return _git("diff", "--name-only", commit, "--", *SOURCE) == "" and not list_changes()


def has_history() -> bool:
    """Return whether this checkout has the commits before its own, which a shallow one lacks."""
    return _git("rev-parse", "--is-shallow-repository") == "false"


@cache
def count_changes(commit: str, paths: tuple[str, ...]) -> tuple[int, list[str]] | None:
    """Return the commits since `commit` that changed these paths, and the files that differ from HEAD now.

    Pages and results are no part of the paths. None if this checkout does not have the commit.
    """
    excluded = [path for path in SOURCE if path.startswith(":(exclude")]
    files = _git("diff", "--name-only", commit, "HEAD", "--", *paths, *excluded)
    count = _git("rev-list", "--count", f"{commit}..HEAD", "--", *paths, *excluded)
    return None if files is None or count is None else (int(count), files.splitlines())


def _git(*arguments: str) -> str | None:
    """Return git's output; None if git fails or is not installed, as on a machine that has only the files."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None
