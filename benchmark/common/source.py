"""The source that a figure was measured with. Records and pages are written after it, and are no part of it."""

import subprocess

from benchmark.common.paths import ROOT

SOURCE = (
    # The package holds a link to the patches, which git does not follow.
    *("python", "patches", "sgl-kernel", "benchmark", "checkpoints", "training", "scripts"),
    *(":(exclude)benchmark/results", ":(exclude,glob)**/*.md"),
)
"""What decides a figure, as git's path specifications."""


def describe_commit() -> str | None:
    """The commit in 12 digits, followed by "-dirty" where the source differs from it; None without git."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    return commit and commit + ("-dirty" if list_changes() else "")


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
