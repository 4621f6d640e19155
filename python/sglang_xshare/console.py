"""What is printed: a console as wide as its terminal, and sizes."""

import os
import sys

from rich.console import Console
from rich.filesize import decimal

PIPED = 120
"""Columns where stdout is no terminal and COLUMNS does not say."""


def open_console() -> Console:
    """Stdout: as wide as the terminal or COLUMNS says, else `PIPED`; numbers are not coloured."""
    columns = os.environ.get("COLUMNS", "")
    has_width = sys.stdout.isatty() or (columns.isdigit() and int(columns) > 0)
    return _Console(highlight=False, width=None if has_width else PIPED)


class _Console(Console):
    """Leaves a reader that has gone to the command line, which rich would end with 1."""

    def on_broken_pipe(self) -> None:
        """Called where a write has failed."""
        raise BrokenPipeError


def spell_bytes(count: float) -> str:
    """In the unit that fits, of powers of 1,000."""
    return decimal(round(count), precision=2)
