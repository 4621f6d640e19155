"""Helpers for printed output: a console as wide as the terminal, and sizes in bytes."""

import os
import sys

from rich.console import Console
from rich.filesize import decimal

PIPED = 120
"""The number of columns if stdout is not a terminal and COLUMNS is not set."""


def open_console() -> Console:
    """Return a console for stdout. It is as wide as the terminal, COLUMNS or `PIPED`, and does not color numbers."""
    columns = os.environ.get("COLUMNS", "")
    has_width = sys.stdout.isatty() or (columns.isdigit() and int(columns) > 0)
    return _Console(highlight=False, width=None if has_width else PIPED)


class _Console(Console):
    """A console that raises BrokenPipeError, which the command line handles. rich would exit with status 1."""

    def on_broken_pipe(self) -> None:
        """Raise the error of a failed write."""
        raise BrokenPipeError


def spell_bytes(count: float) -> str:
    """Return a number of bytes as text, with a suitable unit that is a power of 1,000."""
    return decimal(round(count), precision=2)
