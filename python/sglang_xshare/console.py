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
    return Console(highlight=False, width=None if has_width else PIPED)


def spell_bytes(count: float) -> str:
    """In the unit that fits, of powers of 1,000."""
    return decimal(round(count), precision=2)
