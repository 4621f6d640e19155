"""Helpers that check or read files before the work of a command starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from .policies.keys import read_object
from .refusal import ExpertPolicyError


@contextmanager
def _refused(flag: str, value: Any, allowed: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExpertPolicyError(flag, value, f"must be {allowed} ({error.strerror})") from None


def try_folder(flag: str, folder: Path) -> None:
    """Create a folder if needed. Check that files can be written to it. Raises `ExpertPolicyError` if this fails."""
    with _refused(flag, folder, "a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass


def try_file(flag: str, file: Path) -> None:
    """Check that a file can be written, but do not change it. Raises `ExpertPolicyError` if this fails."""
    with _refused(flag, file, "a file that can be written"):
        if file.exists() and not file.is_file():
            raise OSError(0, "not a file")
        with file.open("ab") if file.exists() else TemporaryFile(dir=file.parent):
            pass


def read_text(flag: str, file: Path) -> str:
    """Return the text of a file. Raises `ExpertPolicyError` if the file cannot be read. The error names `flag`."""
    try:
        with _refused(flag, file, "a text that can be read"):
            return file.read_text()
    except UnicodeDecodeError as error:
        raise ExpertPolicyError(flag, file, f"must be a text in UTF-8 (byte {error.start} is not UTF-8)") from None


def read_json(flag: str, file: str, allowed: str = "a JSON file") -> dict[str, Any]:
    """Return the JSON object in a file. Raises `ExpertPolicyError` if the file does not contain one."""
    line = " ".join(file.split())
    with _refused(flag, line, allowed):
        content = Path(file).read_bytes()
    try:
        return read_object(content)
    except ValueError as error:
        raise ExpertPolicyError(flag, line, str(error)) from None
