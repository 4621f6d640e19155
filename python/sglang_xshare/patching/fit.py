"""Say hunk by hunk where a queue fits a release's sources, also where it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from .hunk import Hunk, apply_hunks, find_places, split_lines

if TYPE_CHECKING:
    from .patch import Patch


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
    """Each hunk in order against its file as the patches before it left it, and what the files become.

    `contents` are the release's files, by path; one that is not there counts as empty. Hunks that do not fit are left
    out of the files.
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
