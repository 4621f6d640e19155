"""Check the whole patch queue: headers, series, hashes, and every hunk.

python -m scripts.patch_lint    check against the sources in build/releases and against the installed release
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.common.paths import RELEASES
from sglang_xshare.patching.hunk import Hunk, apply_hunks, find_places, split_lines
from sglang_xshare.patching.patch import FIELDS
from sglang_xshare.patching.queue import Queue, find_root, list_releases, load_queue
from sglang_xshare.patching.state import read, read_pristine
from sglang_xshare.patching.tree import PatchError, Tree, find_tree


@dataclass
class Report:
    """The findings of the lint, one line each, and a description of what was checked. Only `errors` fail the lint."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    patches: list[str] = field(default_factory=list)
    proved: dict[str, int] = field(default_factory=dict)  # number of hunks of each release that match one place
    unproved: list[str] = field(default_factory=list)  # releases whose sources are missing here

    @property
    def summary(self) -> str:
        """Return one line that describes what was checked and what was not."""
        proved = ", ".join(f"{release} ({hunks} hunks)" for release, hunks in self.proved.items())
        line = f"{len(self.patches)} patches looked at; each hunk matches one place in {proved or 'no release'}"
        return line + (f"; no sources at hand for {', '.join(self.unproved)}" if self.unproved else "")


def lint(root: Path, releases: Path | None = None) -> Report:
    """Check the patch queue against the sources of SGLang releases.

    `root` is the folder patches/. `releases` is a folder with one subfolder for each unpacked release. The installed
    SGLang is used for its own release if the release is not unpacked.
    """
    report = Report(patches=sorted(str(file.relative_to(root)) for file in root.rglob("*.patch")))
    if not report.patches:
        report.errors.append(f"{root}: no patch found")
    queues = [queue for release in list_releases(root) for queue in _load(root, release, report)]
    _check_folder(queues, report)
    spare: dict[tuple[str, str, int], set[str]] = {}
    for queue in queues:
        report.errors += _check_hashes(queue)
        tree = _find_sources(queue.release, releases)
        if tree is None:
            report.unproved.append(queue.release)
        else:
            _check_sources(queue, tree, report, spare)
    for (name, path, number), sides in spare.items():
        report.warnings += [f"{name}: {path}: hunk {number}: more {side} context than needed" for side in sorted(sides)]
    return report


def _load(root: Path, release: str, report: Report) -> Iterator[Queue]:
    try:
        yield load_queue(root, release)
    except (PatchError, OSError) as error:
        report.errors.append(f"{release}: {error}")


def _check_folder(queues: list[Queue], report: Report) -> None:
    """Check that all headers are complete and that each patch is in a series. Only shared patches can be in several."""
    listed = Counter(patch.name for queue in queues for patch in queue.patches)
    for patch in {patch.name: patch for queue in queues for patch in queue.patches}.values():
        missing = [name for name in FIELDS if not patch.header.get(name)]
        needed = f"must not be empty (fields: {', '.join(FIELDS)})"
        report.errors += [f"{patch.name}: header field {name} {needed}" for name in missing]
        if listed[patch.name] > 1 and not patch.name.startswith("shared/"):
            report.errors.append(f"{patch.name}: must be in shared/ or in one series alone (got {listed[patch.name]})")
    report.errors += [f"{name}: in no series that could be read" for name in report.patches if name not in listed]


def _check_hashes(queue: Queue) -> Iterator[str]:
    touched = {file.path for patch in queue.patches for file in patch.files}
    for path in sorted(touched ^ set(queue.hashes)):
        problem = "changed by the series but not listed" if path in touched else "listed but changed by no patch"
        yield f"{queue.release}/hashes: {path} is {problem}; run `python -m scripts.pin_release {queue.release}`"


def _find_sources(release: str, releases: Path | None) -> Tree | None:
    if releases is not None and (releases / release).is_dir():
        return find_tree(releases / release)
    try:
        installed = find_tree()
    except PatchError:
        return None
    return installed if installed.release == release else None


def _check_sources(queue: Queue, tree: Tree, report: Report, spare: dict[tuple[str, str, int], set[str]]) -> None:
    """Apply the series of a release to its original sources and parse the results.

    `spare` maps each hunk to the sides on which its context is longer than needed. Sides that this release needs are
    removed from it.
    """
    report.proved[queue.release] = 0
    try:
        state = read(tree)
        pristine = read_pristine(tree, state, queue.hashes)
        patched = queue.patch(pristine)
        contents = {path: pristine.get(path, b"") for path in queue.hashes}
        for patch in queue.patches:
            for file in patch.files:
                lines = split_lines(contents[file.path])
                for number, hunk in enumerate(file.hunks, 1):
                    sides = spare.setdefault((patch.name, file.path, number), {"leading", "trailing"})
                    sides &= _find_spare(lines, hunk)
                contents[file.path] = apply_hunks(contents[file.path], file.hunks, patch.name)
                report.proved[queue.release] += len(file.hunks)
        for path, content in patched.items():
            if path.endswith(".py"):
                ast.parse(content, path)
    except (PatchError, SyntaxError) as error:
        report.errors.append(f"SGLang {queue.release}: {error}")


def _find_spare(lines: list[bytes], hunk: Hunk) -> set[str]:
    """Return the sides of a hunk on which the outermost line of context is not needed.

    Only sides with at least two lines of context are tried. A line is not needed if the hunk matches exactly one place
    without it.
    """
    source, target = hunk.source, hunk.target
    shorter = {"leading": source[1:]} if len(source) > 1 and source[:2] == target[:2] else {}
    shorter |= {"trailing": source[:-1]} if len(source) > 1 and source[-2:] == target[-2:] else {}
    return {side for side, trimmed in shorter.items() if len(find_places(lines, Hunk(trimmed, ()))) == 1}


def main() -> None:
    """Print the findings, and exit with status 1 if there are errors."""
    argparse.ArgumentParser(prog="patch_lint", description="check the whole patch queue").parse_args()
    try:
        report = lint(find_root(), RELEASES)
    except PatchError as refused:
        sys.exit(f"patch lint: {refused}")
    for warning in report.warnings:
        print(f"patch lint: warning: {warning}")
    for error in report.errors:
        print(f"patch lint: {error}", file=sys.stderr)
    print(f"patch lint: {report.summary}")
    sys.exit(1 if report.errors else 0)


if __name__ == "__main__":
    main()
