"""Patch files. A patch file has a DEP-3 header with the reason for the patch, followed by unified diffs.

The header follows https://dep-team.pages.debian.net/deps/dep3/ (RFC 2822 fields, continuation lines indented). The
diffs are relative to site-packages. They change or add files of the `sglang` package, but never remove or rename files.
"""

import email
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

import unidiff

from .hunk import Hunk
from .tree import PatchError

FIELDS = ("Description", "Reason", "Upstream-Status", "Drop-When")
LOCKED = "sglang/__init__.py"  # replacing this file would break the lock that is held on it (tree.py)


@dataclass(frozen=True)
class FileDiff:
    """The hunks for one file. `path` is relative to site-packages. A new file has one hunk, without source lines."""

    path: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """A parsed patch file. `name` is its path relative to patches/."""

    name: str
    header: Mapping[str, str]
    files: tuple[FileDiff, ...]


def parse_patch(text: str, name: str) -> Patch:
    """Parse the header and the diffs of a patch file.

    Raises PatchError if the patch is malformed, or if it changes a file outside `sglang/`.
    """
    lines = text.splitlines(keepends=True)
    if lines and lines[0].endswith("\r\n"):  # the header ends in LF even if the diff is of a CRLF file
        raise PatchError(
            f"{name}: lines must end in LF (got CRLF); git has converted them: clone with "
            "`git clone -c core.autocrlf=false`"
        )
    start = next((i for i, line in enumerate(lines) if line.startswith(("--- ", "diff --git "))), len(lines))
    header = email.message_from_string("".join(lines[:start]))
    body = str(header.get_payload()).strip()
    if body:
        raise PatchError(f"{name}: {body.splitlines()[0]!r} must be a header field, a line 'Field: text'")
    diff = "".join(lines[start:])
    try:
        diffs = unidiff.PatchSet(diff)
    except unidiff.UnidiffParseError as error:
        raise PatchError(f"{name}: malformed diff: {str(error).strip()}") from error
    if not diffs:
        raise PatchError(f"{name}: a diff must follow the header (got none)")
    _check_complete(diffs, diff.count("\n") + (not diff.endswith("\n")), name)
    files = tuple(_read_file(file, name) for file in diffs)
    return Patch(name, {field: " ".join(value.split()) for field, value in header.items()}, files)


def _check_complete(diffs: unidiff.PatchSet, lines: int, name: str) -> None:
    """Raise PatchError if lines follow a complete hunk.

    The parser unidiff drops such lines, so a wrong count in an `@@` line would lose a change.
    """
    notes = [note for file in diffs for note in file.patch_info or ()]
    stray = [note for note in notes if not note.startswith(("diff --git ", "index "))]
    parsed = len(notes) + sum(2 + sum(1 + len(hunk) for hunk in file) for file in diffs)
    if stray or parsed != lines:
        example = f": {stray[0].strip()!r}" if stray else ""
        raise PatchError(f"{name}: lines outside every hunk (wrong counts in an @@ line?){example}")


def _read_file(file: unidiff.PatchedFile, name: str) -> FileDiff:
    old, new = PurePosixPath(file.source_file), PurePosixPath(file.target_file)
    path = str(new.relative_to("b")) if new.is_relative_to("b") else str(new)
    inside = path.startswith("sglang/") and ".." not in new.parts and path != LOCKED
    if not inside or str(new) != f"b/{path}" or str(old) not in (f"a/{path}", "/dev/null"):
        raise PatchError(
            f"{name}: {old} -> {new}: must be a/sglang/FILE -> b/sglang/FILE, the same file and not {LOCKED}, "
            "or /dev/null -> b/sglang/FILE, a new file"
        )
    hunks = tuple(_read_hunk(hunk) for hunk in file)
    if str(old) == "/dev/null" and [hunk.source for hunk in hunks] != [()]:
        raise PatchError(f"{name}: {path}: a new file must have one hunk, of added lines only")
    return FileDiff(path, hunks)


def _read_hunk(hunk: unidiff.Hunk) -> Hunk:
    source: list[bytes] = []
    target: list[bytes] = []
    for line, after in zip(hunk, [*hunk[1:], None], strict=True):
        unended = after is not None and after.line_type == "\\"  # "\ No newline at end of file" follows
        value = (line.value.removesuffix("\n") if unended else line.value).encode()
        if line.is_context or line.is_removed:
            source.append(value)
        if line.is_context or line.is_added:
            target.append(value)
    return Hunk(tuple(source), tuple(target))
