"""Files that a command line names: whether one can be written, tried before any work is done for it; keys of one."""

from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from .policies.keys import read_object
from .refusal import ExpertPolicyError


def try_folder(flag: str, folder: Path) -> None:
    """Make a folder, and write in it. Raises ValueError in one line where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {folder}: {error.strerror}; allowed is a folder that can be written") from None


def try_file(flag: str, file: Path) -> None:
    """Try, beside others, that a file can be written, and leave it as it was. Raises `ExpertPolicyError`."""
    try:
        if file.exists() and not file.is_file():
            raise OSError(0, "not a file")
        with file.open("ab") if file.exists() else TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ExpertPolicyError(flag, file, f"{error.strerror}; allowed is a file that can be written") from None


def read_text(flag: str, file: Path) -> str:
    """A text of a folder that a flag names. Raises ValueError in one line where it is none."""
    try:
        return file.read_text()
    except OSError as error:
        raise ValueError(f"{flag} {file}: {error.strerror}; allowed are texts that can be read") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {file}: byte {error.start} is not UTF-8; allowed are texts in UTF-8") from None


def read_json(flag: str, file: str, allowed: str = "a JSON file") -> dict[str, Any]:
    """The keys of a JSON file. Raises `ExpertPolicyError`."""
    try:
        return read_object(Path(file).read_bytes())
    except OSError as error:
        reason = f"{error.strerror}; allowed is {allowed}"
    except ValueError as error:
        reason = str(error)
    raise ExpertPolicyError(flag, " ".join(file.split()), reason)
