"""The patch queue of one release: `patches/<release>/series`, the patches it lists, `hashes` of what they change."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from .hunk import Hunk, apply_hunks, find_places, split_lines
from .tree import ABSENT, PatchError, digest

if TYPE_CHECKING:
    from .patch import Patch


@dataclass(frozen=True)
class Queue:
    """Patches in the order of the series. `hashes`: sha256 of every file they change, as released; `ABSENT` for an
    added one.
    """

    release: str
    patches: tuple[Patch, ...]
    hashes: Mapping[str, str]

    def patch(self, pristine: Mapping[str, bytes]) -> dict[str, bytes]:
        """Patched content of every file in `hashes`, from the release's content of each that it has. Raises PatchError
        for content with another hash, and for a hunk that does not match exactly one place.
        """
        check_contents(self.release, self.hashes, pristine)
        contents = {path: pristine.get(path, b"") for path in self.hashes}
        for patch in self.patches:
            for file in patch.files:
                if file.path not in contents:
                    raise PatchError(f"{patch.name}: {file.path} is not in patches/{self.release}/hashes")
                contents[file.path] = apply_hunks(contents[file.path], file.hunks, f"{patch.name}: {file.path}")
        return contents


def check_contents(release: str, hashes: Mapping[str, str], pristine: Mapping[str, bytes]) -> None:
    """Raise PatchError unless the files are the release's own: those of `hashes`, and no others in their places."""
    for path, wanted in hashes.items():
        found = digest(pristine[path]) if path in pristine else ABSENT
        if found == wanted:
            continue
        if wanted == ABSENT:
            raise PatchError(f"{path}: is there already, but SGLang {release} has no such file; remove it")
        said = "is missing" if found == ABSENT else f"sha256 {found[:12]}… found, {wanted[:12]}… expected"
        raise PatchError(f"{path}: {said}: not the file of SGLang {release}; reinstall sglang=={release}")


def find_root() -> Path:
    """The patches/ directory: packaged with us; in a checkout that is a link to the one beside python/."""
    return (Path(__file__).parents[1] / "patches").resolve()


def list_releases(root: Path) -> list[str]:
    """The supported releases (folders with a series), newest last. Raises PatchError for a folder of another name."""
    names = [file.parent.name for file in root.glob("*/series")]
    try:
        return sorted(names, key=Version)
    except InvalidVersion as error:
        raise PatchError(f"{root}: {error}; allowed are folders named by releases") from None


def read_series(root: Path, release: str) -> list[str]:
    """The release's patches in order, relative to `root`. Raises PatchError for a release that is not supported."""
    if release not in list_releases(root):
        raise PatchError(f"SGLang {release} is not supported; supported: {', '.join(list_releases(root)) or 'none'}")
    lines = (line.partition("#")[0].strip() for line in (root / release / "series").read_text().splitlines())
    return [line for line in lines if line]


def read_hashes(root: Path, release: str) -> dict[str, str]:
    """The release's `hashes`, lines of sha256sum: 64 hex digits, two spaces, path."""
    hashes = {}
    for line in (root / release / "hashes").read_text().splitlines():
        value, separator, path = line.partition("  ")
        if len(value) != 64 or not separator or not path:
            raise PatchError(f"{release}/hashes: {line!r} is not a line of sha256sum: 64 hex digits, two spaces, path")
        hashes[path] = value
    return hashes


def read_digest(root: Path, release: str) -> str:
    """sha256 over names and contents of the release's patches in order: what a patched tree is compared by."""
    total = hashlib.sha256()
    for name in read_series(root, release):
        total.update(f"{name}\n{digest(_read_patch(root, name))}\n".encode())
    return total.hexdigest()


def load_queue(root: Path, release: str) -> Queue:
    """Read the queue of one release. Raises PatchError where it is not supported, or a file is missing or malformed."""
    from .patch import parse_patch  # a server compares digests only: it needs no patch parser

    names = read_series(root, release)
    patches = tuple(parse_patch(_read_patch(root, name).decode(), name) for name in names)
    return Queue(release, patches, read_hashes(root, release))


def _read_patch(root: Path, name: str) -> bytes:
    if not (root / name).is_file():
        raise PatchError(f"{name}: listed in a series, but there is no such file in {root}")
    return (root / name).read_bytes()


@dataclass(frozen=True)
class Fit:
    """One hunk of a patch, and the lines of its file (from 1) where it matches: it fits where that is one line."""

    patch: str
    path: str
    number: int
    hunk: Hunk
    lines: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """Whether the hunk matches exactly one place."""
        return len(self.lines) == 1

    def __str__(self) -> str:
        source, target = self.hunk.source, self.hunk.target
        kept = sum(block.size for block in SequenceMatcher(None, source, target, False).get_matching_blocks())
        where = f"{self.path}:{self.lines[0] + self.hunk.context()[0]}" if self.fits else self.path
        line = f"{where} +{len(target) - kept} -{len(source) - kept} {self.patch}"
        if self.fits:
            return line + ", a new file" * (not source)
        places = f" (lines {', '.join(map(str, self.lines))})" if self.lines else ""
        return f"{line}: hunk {self.number} matches {len(self.lines)} places{places}"


def find_fits(patches: Sequence[Patch], contents: Mapping[str, bytes]) -> tuple[list[Fit], dict[str, bytes]]:
    """Each hunk in order against its file as the patches before it left it, and what the files become without those
    that do not fit. `contents` are the release's files, by path; one that is not there counts as empty.
    """
    fits = []
    left = dict(contents)
    for patch in patches:
        for file in patch.files:
            content = left.get(file.path, b"")
            lines = split_lines(content)
            found = [
                Fit(patch.name, file.path, number, hunk, tuple(place + 1 for place in find_places(lines, hunk)))
                for number, hunk in enumerate(file.hunks, 1)
            ]
            left[file.path] = apply_hunks(content, [fit.hunk for fit in found if fit.fits], patch.name)
            fits += found
    return fits, left
