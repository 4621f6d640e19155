"""Hunks, and their application to a file's content, each at the only place that matches.

No library guarantees that a hunk has only one place. `patch-ng` reads only the line number in the hunk header, compares
lines without their ends, and drops context with `fuzz`; `git apply` and `patch` take the nearest of several matches.
This module ignores line numbers: a hunk with little context fits many releases, and is safe only if it matches ONE
place in each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from .tree import PatchError


@dataclass(frozen=True)
class Hunk:
    """Consecutive lines to find (`source`) and their replacement (`target`), as bytes with line ends."""

    source: tuple[bytes, ...]
    target: tuple[bytes, ...]


def split_lines(content: bytes) -> list[bytes]:
    """Return lines with their ends. Only \\n ends a line, so the joined lines equal `content`."""
    return BytesIO(content).readlines()


def find_places(lines: Sequence[bytes], hunk: Hunk) -> list[int]:
    """Return each index of `lines` at which the hunk matches; a hunk without source matches only in an empty file."""
    size = len(hunk.source)
    starts = range(len(lines) - size + 1) if size or not lines else ()
    return [start for start in starts if tuple(lines[start : start + size]) == hunk.source]


def apply_hunks(content: bytes, hunks: Sequence[Hunk], where: str) -> bytes:
    """Return `content`, empty for a new file, after all hunks of one patch. Hunks match the content before the patch.

    Raises PatchError, naming `where` (patch and file), for a hunk with no place or several, for two hunks that overlap,
    and if a line would lose its end.
    """
    lines = split_lines(content)
    starts = []
    for number, hunk in enumerate(hunks, 1):
        places = find_places(lines, hunk)
        if len(places) != 1:
            at = f" (lines {', '.join(str(place + 1) for place in places)})" if places else ""
            raise PatchError(f"{where}: hunk {number} matches {len(places)} places{at}; it must match exactly one")
        starts.append(places[0])
    following = len(lines)
    for start, hunk in sorted(zip(starts, hunks, strict=True), key=lambda found: found[0], reverse=True):
        if start + len(hunk.source) > following:
            raise PatchError(f"{where}: two hunks overlap at line {following + 1}")
        lines[start : start + len(hunk.source)] = hunk.target
        following = start
    if any(not line.endswith(b"\n") for line in lines[:-1]):
        raise PatchError(f"{where}: a line without a newline would no longer be the last of the file")
    return b"".join(lines)
