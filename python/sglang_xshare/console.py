"""The command line's flags and tables: how wrong ones are told, and where the others are printed."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any, NoReturn

from rich.console import Console

PIPED = 120
"""Columns where stdout is no terminal and COLUMNS does not say."""


class Parser(argparse.ArgumentParser):
    """Tells a wrong command line in one line, as every other error of a verb is told, and ends with 1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-\.?\d|-inf|-nan")  # so is -3% a value, not a flag

    def error(self, message: str) -> NoReturn:
        """Leave with the line."""
        verb = self.prog.partition(" ")[2] or self.prog
        self.exit(1, f"{verb}: {' '.join(message.removeprefix('argument ').split())}\n")


def open_console() -> Console:
    """Stdout: as wide as the terminal or COLUMNS says, else `PIPED`; numbers are not coloured."""
    columns = os.environ.get("COLUMNS", "")
    is_told = sys.stdout.isatty() or (columns.isdigit() and int(columns) > 0)
    return Console(highlight=False, width=None if is_told else PIPED)
