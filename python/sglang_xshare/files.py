"""Files that a command line names: whether one can be written, tried before any work is done for it; keys of one."""

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
        raise ExpertPolicyError(flag, value, f"{error.strerror}; allowed {allowed}") from None


def try_folder(flag: str, folder: Path) -> None:
    """Make a folder, and write in it. Raises `ExpertPolicyError`."""
    with _refused(flag, folder, "is a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass


def try_file(flag: str, file: Path) -> None:
    """Try, beside others, that a file can be written, and leave it as it was. Raises `ExpertPolicyError`."""
    with _refused(flag, file, "is a file that can be written"):
        if file.exists() and not file.is_file():
            raise OSError(0, "not a file")
        with file.open("ab") if file.exists() else TemporaryFile(dir=file.parent):
            pass


def read_text(flag: str, file: Path) -> str:
    """A text of a folder that a flag names. Raises `ExpertPolicyError`."""
    try:
        with _refused(flag, file, "are texts that can be read"):
            return file.read_text()
    except UnicodeDecodeError as error:
        raise ExpertPolicyError(flag, file, f"byte {error.start} is not UTF-8; allowed are texts in UTF-8") from None


def read_json(flag: str, file: str, allowed: str = "a JSON file") -> dict[str, Any]:
    """The keys of a JSON file. Raises `ExpertPolicyError`."""
    line = " ".join(file.split())
    with _refused(flag, line, f"is {allowed}"):
        content = Path(file).read_bytes()
    try:
        return read_object(content)
    except ValueError as error:
        raise ExpertPolicyError(flag, line, str(error)) from None
