"""An SGLang installation on disk: its directory, its release, and safe changes to its files."""

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
    """A refusal, with a message of one line.

    The message names the object, its value, and what is allowed. Nothing has changed unless the message reports a
    change.
    """


class NotInstalledError(PatchError):
    """The error if `import sglang` finds no module."""


ABSENT = "0" * 64  # the digest of a missing file, as in git


@dataclass(frozen=True)
class Tree:
    """The directory `root` that contains sglang/.

    It is a site-packages directory, an unpacked wheel, or the directory python/ of a checkout.
    """

    root: Path

    def __str__(self) -> str:
        return f"SGLang {self.release} in {self.root}"

    @property
    def release(self) -> str:
        """Return the SGLang version from the tree's `_version.py`, or else from its metadata."""
        generated = self.root / "sglang/_version.py"
        text = generated.read_text() if generated.is_file() else ""
        if match := re.search(r"^__version__ = .*?['\"](.+?)['\"]$", text, re.MULTILINE):
            return match[1]
        for distribution in importlib.metadata.distributions(name="sglang", path=[str(self.root)]):
            return distribution.version
        raise PatchError(f"{self.root}: neither sglang/_version.py nor sglang-*.dist-info names the SGLang release")

    def read(self, path: str) -> bytes:
        """Return the content of one file.

        Raises PatchError for a missing file, and for a link, because its content belongs to another tree.
        """
        file = self.root / path
        if file.is_symlink() or not file.is_file():
            raise PatchError(f"{file}: must be a plain file (got {'a link' if file.is_symlink() else 'none'})")
        return file.read_bytes()

    def digest(self, path: str) -> str:
        """Return the sha256 of one file in hex, or ABSENT if the file is missing."""
        file = self.root / path
        return digest(self.read(path)) if file.exists() or file.is_symlink() else ABSENT

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the tree. Wait if another run has locked it.

        The kernel releases the lock of a killed run. The locked file exists in every tree. NFS grants an exclusive lock
        only on a file that is open for writing, so a read-only tree is refused at once.
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
    """Return the tree at `target`, or the tree that `import sglang` finds. Raises PatchError if there is none."""
    if target is None:
        spec = importlib.util.find_spec("sglang")
        if spec is None or spec.origin is None:
            raise NotInstalledError("sglang is not installed here; install sglang, or name its directory with --target")
        return Tree(Path(spec.origin).resolve().parents[1])
    if not (target / "sglang/__init__.py").is_file():
        raise PatchError(f"--target {target}: must be a directory that contains sglang/__init__.py")
    return Tree(target.resolve())


def digest(content: bytes) -> str:
    """Return the sha256 of `content` in hex."""
    return hashlib.sha256(content).hexdigest()


def make_folder(folder: Path, like: os.stat_result) -> None:
    """Make a folder with the mode and owner of `like`, whatever the umask. Leave an existing folder unchanged."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        _copy_access(folder, like, stat.S_IMODE(like.st_mode))


def write_file(file: Path, content: bytes, like: os.stat_result) -> None:
    """Write a new file to disk. `sync_directory` writes its directory entry.

    The file gets the mode and owner of the folder `like`, without the execute bits. The umask has no effect.
    """
    with open(file, "wb") as stream:
        stream.write(content)
        stream.flush()
        _copy_access(file, like, stat.S_IMODE(like.st_mode) & 0o666)
        os.fsync(stream.fileno())


def replace_file(new: Path, old: Path) -> None:
    """Replace the file `old` with the file `new` in one step.

    The new file gets the mode and owner of `old`. If `old` does not exist, they come from its folder. The bytecode of
    `old` is deleted first, because Python would run an unchecked-hash `.pyc` (PEP 552) instead of the new file. The new
    file is at least one second younger than `old`, because a `.pyc` contains the time of its file in whole seconds.
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
    """Remove a module and its bytecode. Python might run this bytecode instead of a later module of the same name."""
    remove_bytecode(file)
    file.unlink()
    sync_directory(file.parent)


def remove_bytecode(file: Path) -> None:
    """Remove every `.pyc` of a module, for all Python versions and optimization levels."""
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _copy_access(file: Path, like: os.stat_result, mode: int) -> None:
    """Set the mode of a file. Also copy the owner and group from `like`, as far as this user may."""
    for owner in (like.st_uid, -1):  # only root may set the owner, and not every user may set the group
        try:
            os.chown(file, owner, like.st_gid)
            break
        except PermissionError:
            continue
    os.chmod(file, mode)


def sync_directory(directory: Path) -> None:
    """Write the entries of a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
