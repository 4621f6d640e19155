"""Printed output: a console as wide as its terminal, and sizes."""

import os
import sys

from rich.console import Console
from rich.filesize import decimal

PIPED = 120
"""Columns if stdout is no terminal and COLUMNS is unset."""


def open_console() -> Console:
    """Open stdout, as wide as the terminal or COLUMNS, else `PIPED`; numbers are not coloured."""
    columns = os.environ.get("COLUMNS", "")
    has_width = sys.stdout.isatty() or (columns.isdigit() and int(columns) > 0)
    return _Console(highlight=False, width=None if has_width else PIPED)


class _Console(Console):
    """A console that raises BrokenPipeError for the command line; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        """Handle a failed write."""
        raise BrokenPipeError


def spell_bytes(count: float) -> str:
    """Return a number of bytes in a fitting unit, a power of 1,000."""
    return decimal(round(count), precision=2)
