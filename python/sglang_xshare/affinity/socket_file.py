"""The file of a server's own socket, in a folder that no other user of the machine can enter."""

import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX, NAME = "sglang-xshare-ended-", "socket"
LONGEST = 107
"""Most bytes of a socket's path: `sun_path` of sockaddr_un on Linux has 108, with the final zero."""
SETTLED = 60.0
"""Seconds for which a folder without a listener may be a starting server's; later it is a killed server's."""


def find_path(instance: str) -> Path:
    """Return the path of a server instance's socket, the same in all processes of the server.

    The path lies below the temporary directory, or below /tmp if it would be too long otherwise. A missing folder is
    created. Raises OSError if another user can enter the folder.
    """
    path = Path(tempfile.gettempdir(), PREFIX + instance, NAME)
    if len(os.fsencode(path)) > LONGEST:
        path = Path("/tmp", PREFIX + instance, NAME)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(path.parent):
        raise PermissionError(f"{path.parent} must be a folder that only this user can enter, mode 0700")
    return path


def remove(path: Path) -> None:
    """Remove a socket and its folder. A missing folder, or a folder with other content, is no error."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def remove_dead(path: Path) -> None:
    """Remove a socket and its folder unless a process listens there."""
    if not _is_listening(path):
        remove(path)


def sweep(folder: Path) -> None:
    """Remove the sockets of this user's killed servers from `folder`: a killed process runs no finalizer."""
    for left in folder.glob(f"{PREFIX}*"):
        try:
            is_old = time.time() - left.lstat().st_mtime > SETTLED
        except FileNotFoundError:  # another server has removed the folder
            continue
        if is_old and _is_own(left):
            remove_dead(left / NAME)


def _is_own(folder: Path) -> bool:
    """Return whether `folder` is a folder, and no link to one, that only this user can enter."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    is_private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    return is_private and status.st_uid == os.geteuid()


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full queue of a listener would block
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
