"""Helpers for printed output: a console, and numbers of bytes as text."""

import os
import sys

from rich.console import Console
from rich.filesize import decimal

PIPED = 120
"""The number of columns if stdout is not a terminal and COLUMNS is not set."""


def open_console() -> Console:
    """Return a console that prints to stdout.

    Its width comes from the terminal or from COLUMNS, otherwise the width is `PIPED`. The console does not color
    numbers.
    """
    columns = os.environ.get("COLUMNS", "")
    has_width = sys.stdout.isatty() or (columns.isdigit() and int(columns) > 0)
    return _Console(highlight=False, width=None if has_width else PIPED)


class _Console(Console):
    """A console that raises BrokenPipeError for a closed pipe. The command line handles this error.

    Without this class rich would exit with status 1.
    """

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError instead of exiting."""
        raise BrokenPipeError


def spell_bytes(count: float) -> str:
    """Return a number of bytes as text, such as "1.50 GB". Units are powers of 1,000."""
    return decimal(round(count), precision=2)
