"""Hunks of a patch. Each hunk is applied at the only place of a file that matches.

This module ignores line numbers, because a hunk with little context fits many releases. Such a hunk is safe only if it
matches exactly one place in each release, and no library guarantees this. `patch-ng` reads only the line number in the
hunk header, compares lines without their line ends, and drops context with `fuzz`. `git apply` and `patch` choose the
nearest of several matches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from .tree import PatchError


@dataclass(frozen=True)
class Hunk:
    """Consecutive lines to find (`source`), and the lines that replace them (`target`).

    The lines are bytes and include their line ends.
    """

    source: tuple[bytes, ...]
    target: tuple[bytes, ...]


def split_lines(content: bytes) -> list[bytes]:
    """Return the lines with their line ends. Only \\n ends a line, so the joined lines equal `content`."""
    return BytesIO(content).readlines()


def find_places(lines: Sequence[bytes], hunk: Hunk) -> list[int]:
    """Return each index of `lines` at which the hunk matches.

    A hunk without source lines matches only an empty file.
    """
    size = len(hunk.source)
    starts = range(len(lines) - size + 1) if size or not lines else ()
    return [start for start in starts if tuple(lines[start : start + size]) == hunk.source]


def apply_hunks(content: bytes, hunks: Sequence[Hunk], where: str) -> bytes:
    """Return the content of a file after all hunks of one patch.

    `content` is the content before the patch, or empty for a new file. All hunks must match this content. Raises
    PatchError if a hunk matches no place or several places, if two hunks overlap, or if a line would lose its line end.
    `where` names the patch and the file in the error.
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
