"""The patch queue of a release, from the folder `patches/<release>`.

The file `series` lists the patches in order. The file `hashes` contains the hashes of the changed files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from .hunk import apply_hunks
from .tree import ABSENT, PatchError, digest

if TYPE_CHECKING:
    from .patch import Patch


@dataclass(frozen=True)
class Queue:
    """The patches of a release, in order.

    `hashes` contains the sha256 of every changed file before the patches. It is `ABSENT` for a file that a patch adds.
    """

    release: str
    patches: tuple[Patch, ...]
    hashes: Mapping[str, str]

    def patch(self, pristine: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the patched content of every file in `hashes`.

        `pristine` contains the content of the release's own files. Raises PatchError if a file has another hash, or if
        a hunk does not match exactly one place.
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
    """Raise PatchError if a file differs from the release's own file. A file that a patch adds must be absent."""
    for path, wanted in hashes.items():
        found = digest(pristine[path]) if path in pristine else ABSENT
        if found == wanted:
            continue
        if wanted == ABSENT:
            raise PatchError(f"{path}: must be absent, because SGLang {release} has no such file; remove {path}")
        said = "is missing" if found == ABSENT else f"sha256 {found[:12]}… found, {wanted[:12]}… expected"
        raise PatchError(f"{path}: {said}: not the file of SGLang {release}; reinstall sglang=={release}")


def find_root() -> Path:
    """Return the directory patches/ of this package.

    In a checkout, it is a link to the directory beside python/. Raises PatchError if it is a plain file, as in a ZIP or
    in a clone without symbolic links.
    """
    root = Path(__file__).parents[1] / "patches"
    if not root.is_dir():
        found = "a plain file" if root.is_file() else "nothing"
        raise PatchError(
            f"{root}: must be a folder or a link to one (got {found}); the checkout has lost its symbolic links: clone "
            "it with `git clone -c core.symlinks=true`, or install a wheel"
        )
    return root.resolve()


def list_releases(root: Path) -> list[str]:
    """Return the supported releases, with the newest last. A supported release has a folder with a series."""
    return sorted((file.parent.name for file in root.glob("*/series")), key=Version)


def read_series(root: Path, release: str) -> list[str]:
    """Return the paths of the patches in order, relative to `root`. Raises PatchError for an unsupported release."""
    if release not in list_releases(root):
        raise PatchError(f"SGLang {release} is not supported; supported: {', '.join(list_releases(root)) or 'none'}")
    lines = (line.partition("#")[0].strip() for line in (root / release / "series").read_text().splitlines())
    return [line for line in lines if line]


def read_hashes(root: Path, release: str) -> dict[str, str]:
    """Return the sha256 of each file that the release's patches change, by path.

    The file `hashes` has the format of sha256sum. A line contains 64 hex digits, two spaces, and a path.
    """
    lines = (line.partition("  ") for line in (root / release / "hashes").read_text().splitlines())
    return {path: value for value, _, path in lines}


def read_digest(root: Path, release: str) -> str:
    """Return a sha256 over the names and contents of the release's patches, in order. It identifies the queue."""
    total = hashlib.sha256()
    for name in read_series(root, release):
        total.update(f"{name}\n{digest((root / name).read_bytes())}\n".encode())
    return total.hexdigest()


def load_queue(root: Path, release: str) -> Queue:
    """Read the patch queue of a release. Raises PatchError if the release is unsupported or a patch is malformed."""
    from .patch import parse_patch  # a server only compares digests, and may lack the patch parser

    names = read_series(root, release)
    patches = tuple(parse_patch((root / name).read_bytes().decode(), name) for name in names)
    return Queue(release, patches, read_hashes(root, release))
