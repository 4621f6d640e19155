"""Put hunks into a file's content, each at the one place it matches.

Application is ours because no library promises that. `patch-ng` looks only at the line number in the hunk header,
compares lines without their ends, and with `fuzz` drops context; `git apply` and `patch` take the nearest of several
matches. Here line numbers are ignored: a hunk with so little context that it fits many releases is safe only if it fits
ONE place in each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from .tree import PatchError


@dataclass(frozen=True)
class Hunk:
    """Consecutive lines to find (`source`) and what replaces them (`target`), as bytes with their line ends."""

    source: tuple[bytes, ...]
    target: tuple[bytes, ...]


def split_lines(content: bytes) -> list[bytes]:
    """Lines with their ends; only \\n ends a line, so joining them gives back every byte."""
    return BytesIO(content).readlines()


def find_places(lines: Sequence[bytes], hunk: Hunk) -> list[int]:
    """Every index of `lines` where the hunk's source lines follow; of a new file's, without any, only in no lines."""
    size = len(hunk.source)
    starts = range(len(lines) - size + 1) if size or not lines else ()
    return [start for start in starts if tuple(lines[start : start + size]) == hunk.source]


def apply_hunks(content: bytes, hunks: Sequence[Hunk], where: str) -> bytes:
    """Apply all hunks of one patch to one file, empty where it is new, each found in `content` as it is before. Raises
    PatchError, naming `where` (patch and file), for a hunk with no place or several, for two that overlap, and where a
    line would lose its end.
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
