"""Report how each hunk of the patch queue fits an SGLang release, and print a verdict.

    python -m scripts.release_check 0.5.24

The release need not be supported. If it has no series of its own, the program tries the series of all supported
releases and reports the best one. The exit code is 0 if every hunk matches exactly one place.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.common.paths import RELEASES
from scripts.compatibility import read_needs
from scripts.fetch_release import fetch_release, tell_download
from sglang_xshare.patching.hunk import Hunk, apply_hunks, find_places, split_lines
from sglang_xshare.patching.patch import Patch, parse_patch
from sglang_xshare.patching.queue import Queue, check_contents, find_root, list_releases, load_queue
from sglang_xshare.patching.tree import PatchError


@dataclass(frozen=True)
class Fit:
    """A hunk of a patch, and the places that it matches. `lines` contains the line numbers of these places, from 1."""

    patch: str
    path: str
    number: int
    hunk: Hunk
    lines: Sequence[int]

    @property
    def fits(self) -> bool:
        """Return whether the hunk matches exactly one place."""
        return len(self.lines) == 1

    def __str__(self) -> str:
        places = f"at {self.lines[0]}" if self.fits else f"matches {len(self.lines)} places"
        lines = f" (lines {', '.join(map(str, self.lines))})" if self.lines[1:] else ""
        return f"{self.path}: hunk {self.number} of {self.patch} {places}{lines}"


def find_fits(patches: Sequence[Patch], contents: Mapping[str, bytes]) -> tuple[list[Fit], dict[str, bytes]]:
    """Apply all hunks that fit, and return the fit of each hunk and the resulting files.

    `contents` maps paths to the files of a release. A missing file counts as empty.
    """
    fits, left = [], dict(contents)
    for patch in patches:
        for file in patch.files:
            content = left.get(file.path, b"")
            lines = split_lines(content)
            places = [[place + 1 for place in find_places(lines, hunk)] for hunk in file.hunks]
            hunks = enumerate(zip(file.hunks, places, strict=True), 1)
            found = [Fit(patch.name, file.path, number, *one) for number, one in hunks]
            left[file.path] = apply_hunks(content, [fit.hunk for fit in found if fit.fits], patch.name)
            fits += found
    return fits, left


@dataclass(frozen=True)
class Trial:
    """The result of applying a queue to a release. If all hunks fit but the result is wrong, `problem` says why."""

    queue: Queue
    fits: list[Fit]
    problem: str = ""

    @property
    def failing(self) -> list[str]:
        """Return the names of the patches whose hunks do not all fit."""
        return list(dict.fromkeys(fit.patch for fit in self.fits if not fit.fits))


def try_queue(tree: Path, queue: Queue, pinned: bool) -> Trial:
    """Try to apply a queue to a release. If `pinned` is true, the hashes of the queue must match the files."""
    contents = _read_files(tree, queue.patches)
    fits, patched = find_fits(queue.patches, contents)
    if all(fit.fits for fit in fits):
        try:
            if pinned:
                check_contents(queue.release, queue.hashes, contents)
            for path, content in patched.items():
                if path.endswith(".py"):
                    ast.parse(content, path)
        except (PatchError, SyntaxError) as error:
            return Trial(queue, fits, str(error))
    return Trial(queue, fits)


def find_best(tree: Path, release: str, root: Path) -> Trial:
    """Try the queue of the release, or all queues if the release has none, and return the best trial.

    The best trial has the fewest hunks that do not fit. If several queues are equal, the newest one is returned.
    """
    releases = list_releases(root)
    if release in releases:
        return try_queue(tree, load_queue(root, release), pinned=True)
    trials = [try_queue(tree, load_queue(root, name), pinned=False) for name in reversed(releases)]
    return min(trials, key=lambda trial: sum(not fit.fits for fit in trial.fits))


def name_matter(name: str) -> str:
    """Return the subject of a patch, which is its file name without the range of releases."""
    return Path(name).stem.split("-until-")[0]


def explain(fit: Fit, tree: Path, patches: Sequence[Patch]) -> list[str]:
    """Return lines that explain why a hunk does not fit.

    They contain the lines that are missing in the file, and other patches of the same subject that fit.
    """
    file = tree / fit.path
    lines = set(split_lines(file.read_bytes())) if file.is_file() else set()
    missing = [line.decode().strip() for line in fit.hunk.source if line not in lines]
    found = [f"no line {line!r}" for line in missing] if file.is_file() else ["no such file"]
    for other in patches:
        fits, _ = find_fits([other], _read_files(tree, [other]))
        if name_matter(other.name) == name_matter(fit.patch) and all(hunk.fits for hunk in fits):
            found.append(f"{other.name} fits")
    return found


def check_release(release: str, root: Path, releases: Path = RELEASES) -> tuple[list[str], bool]:
    """Return the lines of the report, and whether every hunk fits. The last line is the verdict."""
    tree = fetch_release(release, releases)
    best = find_best(tree, release, root)
    patches = [parse_patch(file.read_text(), str(file.relative_to(root))) for file in sorted(root.rglob("*.patch"))]
    lines = [f"SGLang {release}: {read_needs(tree)}"]
    for fit in best.fits:
        lines.append(f"  {'fits    ' if fit.fits else 'DOES NOT'}  {fit}")
        if not fit.fits:
            lines += [f"            {line}" for line in explain(fit, tree, patches)]
    return [*lines, f"release_check: {_judge(best, release, root)}"], not best.failing and not best.problem


def _judge(best: Trial, release: str, root: Path) -> str:
    series = f"the series of {best.queue.release}"
    if best.problem:
        return f"{release}: every hunk of {series} fits, but {best.problem}"
    if best.failing:
        count = f"{len(best.failing)} of {len(best.queue.patches)} patches"
        return f"{release} is not supported: {count} in {series} do not fit: {', '.join(best.failing)}"
    if release in list_releases(root):
        return f"{release} is supported: its {len(best.fits)} hunks fit, and its files have their pinned hashes"
    hunks = f"the {len(best.fits)} hunks of {series} fit"
    return f"{release} is not supported yet, but {hunks}; continue with CONTRIBUTING.md"


def _read_files(tree: Path, patches: Sequence[Patch]) -> dict[str, bytes]:
    paths = {file.path for patch in patches for file in patch.files}
    return {path: (tree / path).read_bytes() for path in paths if (tree / path).is_file()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="a released version, e.g. 0.5.24")
    version = parser.parse_args().version
    try:
        report, good = check_release(version, find_root())
    except subprocess.CalledProcessError as error:
        sys.exit(f"release_check: {tell_download(version, error)}")
    except (PatchError, ValueError) as error:
        sys.exit(f"release_check: {error}")
    print("\n".join(report))
    sys.exit(not good)
