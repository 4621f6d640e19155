"""Whether a verb can write what it will leave, tried before it works for it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile


def try_folder(flag: str, folder: Path) -> None:
    """Make a folder, and write in it. Raises ValueError in one line where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {folder}: {error.strerror}; allowed is a folder that can be written") from None


def try_file(flag: str, file: Path) -> None:
    """Open a file for writing, and leave it as it was. Raises ValueError in one line where that cannot be."""
    existed = file.exists()
    try:
        with file.open("ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise ValueError(f"{flag} {file}: {error.strerror}; allowed is a file that can be written") from None
