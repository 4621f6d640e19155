"""A SGLang installation on disk: its folder, its release, and safe changes of its files."""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class PatchError(Exception):
    """A refusal in one line: the object, its value, what is allowed. Nothing changed unless the line reports it."""


class NotInstalledError(PatchError):
    """A refusal because `import sglang` finds no module."""


ABSENT = "0" * 64  # the digest of a missing file, as in git


@dataclass(frozen=True)
class Tree:
    """The directory `root` that contains sglang/: a site-packages, an unpacked wheel, a checkout's python/."""

    root: Path

    def __str__(self) -> str:
        return f"SGLang {self.release} in {self.root}"

    @property
    def release(self) -> str:
        """Return the SGLang version in the tree's `_version.py`, else in its metadata."""
        generated = self.root / "sglang/_version.py"
        text = generated.read_text() if generated.is_file() else ""
        if match := re.search(r"^__version__ = .*?['\"](.+?)['\"]$", text, re.MULTILINE):
            return match[1]
        for distribution in importlib.metadata.distributions(name="sglang", path=[str(self.root)]):
            return distribution.version
        raise PatchError(f"{self.root}: neither sglang/_version.py nor sglang-*.dist-info names the SGLang release")

    def read(self, path: str) -> bytes:
        """Return the content of one file. Raises PatchError for a link, whose content belongs to another tree."""
        file = self.root / path
        if file.is_symlink() or not file.is_file():
            raise PatchError(f"{file}: must be a plain file (got {'a link' if file.is_symlink() else 'none'})")
        return file.read_bytes()

    def digest(self, path: str) -> str:
        """Return the sha256 of one file, in hex; ABSENT for a missing file."""
        file = self.root / path
        return digest(self.read(path)) if file.exists() or file.is_symlink() else ABSENT

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the tree; wait for another run. The kernel releases the lock of a killed run.

        The locked file exists in every tree. NFS grants exclusive locks only on a file that is open for writing, so a
        read-only tree is refused at once.
        """
        try:
            file = open(self.root / "sglang/__init__.py", "rb+")  # noqa: SIM115 - closed below
        except OSError as error:
            raise PatchError(f"{self.root}: must be a tree that this user may write ({error.strerror})") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another patch run on {self.root}", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def find_tree(target: Path | None = None) -> Tree:
    """Return the tree at `target`, or the tree that `import sglang` would find. Raises PatchError if there is none."""
    if target is None:
        spec = importlib.util.find_spec("sglang")
        if spec is None or spec.origin is None:
            raise NotInstalledError("sglang is not installed here; install sglang, or name its directory with --target")
        return Tree(Path(spec.origin).resolve().parents[1])
    if not (target / "sglang/__init__.py").is_file():
        raise PatchError(f"--target {target}: must be a directory that contains sglang/__init__.py")
    return Tree(target.resolve())


def digest(content: bytes) -> str:
    """Return the sha256 in hex."""
    return hashlib.sha256(content).hexdigest()


def make_folder(folder: Path, like: os.stat_result) -> None:
    """Make `folder` with the mode and owner of `like`, whatever the umask; leave an existing folder unchanged."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        _copy_access(folder, like, stat.S_IMODE(like.st_mode))


def write_file(file: Path, content: bytes, like: os.stat_result) -> None:
    """Write a new file to disk, except its directory entry (`sync_directory`).

    The file gets the mode and owner of the folder `like`, without the execute bits, whatever the umask.
    """
    with open(file, "wb") as stream:
        stream.write(content)
        stream.flush()
        _copy_access(file, like, stat.S_IMODE(like.st_mode) & 0o666)
        os.fsync(stream.fileno())


def replace_file(new: Path, old: Path) -> None:
    """Move `new` over `old` in one step, with the mode and owner of `old`, or of its folder if `old` does not exist.

    The bytecode of `old` is deleted first: Python would run an unchecked-hash `.pyc` (PEP 552) instead of the new file.
    The new file is also at least a second younger than `old`, because Python compares a `.pyc` in whole seconds.
    """
    if old.exists():
        known = old.stat()
        mode, changed = stat.S_IMODE(known.st_mode), max(time.time_ns(), known.st_mtime_ns + 10**9)
    else:
        known = old.parent.stat()
        mode, changed = stat.S_IMODE(known.st_mode) & 0o666, time.time_ns()
    if os.geteuid() not in (0, new.stat().st_uid):  # only root and a file's owner may set its mode and time
        own = new.with_name(f"{new.name}.own")
        write_file(own, new.read_bytes(), known)
        os.replace(own, new)
    _copy_access(new, known, mode)
    os.utime(new, ns=(changed, changed))
    remove_bytecode(old)
    os.replace(new, old)
    sync_directory(old.parent)


def remove_file(file: Path) -> None:
    """Remove a module and its bytecode, which Python might run instead of a later module of this name."""
    remove_bytecode(file)
    file.unlink()
    sync_directory(file.parent)


def remove_bytecode(file: Path) -> None:
    """Remove every `.pyc` that was compiled from a module, of any Python version and optimization level."""
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _copy_access(file: Path, like: os.stat_result, mode: int) -> None:
    """Give `file` the owner and group of `like`, as far as this user may, and `mode`."""
    for owner in (like.st_uid, -1):  # only root may set the owner, and not every user the group
        try:
            os.chown(file, owner, like.st_gid)
            break
        except PermissionError:
            continue
    os.chmod(file, mode)


def sync_directory(directory: Path) -> None:
    """Put a directory's entries on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
