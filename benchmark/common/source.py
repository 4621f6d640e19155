"""The source that a figure was measured with. Records and pages are written after it, and are no part of it."""

import subprocess
from hashlib import sha256
from pathlib import Path

from benchmark.common.paths import ROOT

KERNEL_SHAPES = "python/sglang_xshare/selection/triton_kernel/shapes.json"
"""A run on a GPU rewrites it by what it has just measured, which is in its record."""
SOURCE = (
    # The package holds a link to the patches, which git does not follow.
    *("python", "patches", "sgl-kernel", "benchmark", "checkpoints", "training", "scripts"),
    *(":(exclude)benchmark/results", ":(exclude,glob)**/*.md", f":(exclude){KERNEL_SHAPES}"),
)
"""What decides a figure, as git's path specifications."""
CARRIED = Path(".gpu", "commit")
DIRTY = "-dirty"


def describe_commit() -> str | None:
    """The commit in 12 digits, "-dirty" where the source differs, by `carry`'s sums or git; None without either."""
    carried = _read_carried()
    if carried and not carried.endswith(DIRTY):
        return carried
    return _describe_git() or carried


def carry() -> None:
    """Write the commit and its files' sums to .gpu/commit, which travels without git. Raises RuntimeError without."""
    commit = _describe_git()
    files = _git("ls-files", "--", *SOURCE)
    if commit is None or files is None:
        raise RuntimeError(f"{ROOT}: git does not know this checkout; its commit cannot be carried")
    lines = [commit, *(f"{_sum(ROOT / name)}  {name}" for name in files.splitlines())]
    (ROOT / CARRIED).parent.mkdir(exist_ok=True)
    (ROOT / CARRIED).write_text("\n".join(lines) + "\n")


def _describe_git() -> str | None:
    commit = _git("rev-parse", "--short=12", "HEAD")
    return commit and commit + (DIRTY if list_changes() else "")


def _read_carried() -> str | None:
    """The commit that was carried along; dirty as well where a file is not the one it was."""
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
    """Files of the source that differ from the commit, new ones included."""
    return [line[3:] for line in (_git("status", "--porcelain", "--", *SOURCE) or "").splitlines()]


def is_unchanged_since(commit: str) -> bool:
    """Whether the source is that of `commit`; not where this checkout does not know it."""
    return _git("diff", "--name-only", commit, "--", *SOURCE) == "" and not list_changes()


def _git(*arguments: str) -> str | None:
    """What git says; None where it fails, or is not installed: on a machine that was sent the files alone."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None
