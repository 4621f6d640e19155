"""The command-line parser. It reports each error in one line."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .policies.keys import suggest

LARGEST = 1_000_000_000
"""The largest number that a flag accepts. This limit keeps all computed numbers finite."""


class Parser(argparse.ArgumentParser):
    """A parser that reports each error in one line and then exits with status 1.

    Flags may be before, between and after positional arguments. An unknown flag is an error, except in a subcommand
    that passes unknown flags to SGLang (`server_flags`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-\.?\d|-inf|-nan")  # -3% is a value, not a flag
        self._is_mixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments as argparse does, but accept flags between positional arguments."""
        if self._subparsers is not None or self._is_mixed or not self._get_positional_actions():
            known, others = super().parse_known_args(args, namespace)
        else:
            self._is_mixed = True
            known, others = self.parse_known_intermixed_args(args, namespace)
            self._is_mixed = False
        if others and not self._is_mixed and self._subparsers is None and self.get_default("server_flags") is None:
            near = suggest(others[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(others)}{near}")
        return known, others

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with status 1."""
        subcommand = self.prog.partition(" ")[2] or self.prog
        line = re.sub(r"^argument (-[^:]*): (.*: (?:must|allowed))", r"\1 \2", " ".join(message.split()))
        self.exit(1, f"{subcommand}: {line.removeprefix('argument ')}\n")


def path(text: str) -> Path:
    """Convert the text of a flag to a path. An empty text is an error, because `Path("")` is the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("empty: must be a path")
    return Path(text)


def between(low: float, high: float = LARGEST, kind: type = float, what: str = "a number") -> Callable[[str], Any]:
    """Return a function that converts the text of a flag to a number from `low` to `high`.

    `what` describes such a number in errors.
    """

    def read(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text}: must be {what} of {low:,} to {high:,}")
        return number

    return read


def whole(low: int = 1, high: float = LARGEST) -> Callable[[str], int]:
    """Return a function that converts the text of a flag to an integer from `low` to `high`."""
    return between(low, high, int, "an integer")
