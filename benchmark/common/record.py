"""A file of measurements, written after every point. A killed run loses only the current point."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.common.machine import describe_machine
from benchmark.common.paths import ROOT

FIELDS = {"experiment", "arguments", "sessions", "points"}
DIGITS = 6  # significant digits of a stored number: more than a table shows; all digits would need 25 % more space


class Record:
    """The measured points of one experiment, stored in the file `<folder>/<experiment>.json`.

    Every run that adds points also adds one session, with the date, hardware, versions, commit and command. Each point
    contains the number of its session. Paths inside the checkout are stored relative to the checkout. Measured numbers
    have DIGITS significant digits.

    If `resume` is true, the run continues an existing record, which must have the same `arguments`. Otherwise the first
    new point replaces the old record. Raises ValueError if the existing file cannot be continued.
    """

    def __init__(
        self,
        folder: Path,
        experiment: str,
        command: Sequence[str],
        arguments: Mapping[str, Any] | None = None,
        resume: bool = True,
    ) -> None:
        self.path = folder / f"{experiment}.json"
        self._command = list(command)
        asked = json.loads(_to_line(dict(arguments or {})))
        self._content: dict[str, Any] = {"experiment": experiment, "arguments": asked, "sessions": [], "points": {}}
        self._session: int | None = None
        if resume and self.path.exists():
            self._content = read_record(self.path, experiment)
            self._check_arguments(asked)

    def __contains__(self, key: str) -> bool:
        return key in self._content["points"]

    @property
    def content(self) -> dict[str, Any]:
        """Return the whole record, in the format that `read_record` returns."""
        return self._content

    @property
    def points(self) -> dict[str, Any]:
        """Return a dict from each key to its measurements."""
        return self._content["points"]

    def add(self, key: str, **measured: Any) -> None:
        """Add a point and write the record to disk. The new point replaces a point with the same key."""
        if self._session is None:
            self._session = len(self._content["sessions"])
            self._content["sessions"].append({**describe_machine(), "command": self._command})
        point = json.loads(_to_line({"session": self._session, **measured}))
        self._content["points"][key] = _round(point)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_suffix(".half")
        half.write_text(format_record(self._content))
        os.replace(half, self.path)

    def _check_arguments(self, asked: Mapping[str, Any]) -> None:
        recorded = self._content["arguments"]
        for name in [*recorded, *asked]:
            if recorded.get(name) != asked.get(name):
                values = f"{name} must be {recorded.get(name)}, as recorded (got {asked.get(name)})"
                raise ValueError(f"{self.path}: {values}; or give another --out, or no --resume")


def read_record(path: Path, experiment: str | None = None) -> dict[str, Any]:
    """Read a record from a file. Raises ValueError if the file is not a record of this experiment."""
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be a record, or not exist (got {error})") from None
    if not isinstance(content, dict) or content.keys() != FIELDS:
        raise ValueError(f"{path} must be a record, with {', '.join(sorted(FIELDS))}, or not exist")
    if experiment is not None and content["experiment"] != experiment:
        raise ValueError(f"{path} must be a record of {experiment} (got one of {content['experiment']})")
    return content


def last_session(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the newest session in a record."""
    return max(content["sessions"], key=lambda session: session["date"])


def format_record(content: Mapping[str, Any]) -> str:
    """Format a record as JSON. The arguments, each session and each point have one line each."""
    parts = []
    for name, part in content.items():
        if name == "sessions":
            text = f"[{_join(_to_line(session) for session in part)}]"
        elif name == "points":
            text = f"{{{_join(f'{_to_line(key)}: {_to_line(point)}' for key, point in part.items())}}}"
        else:
            text = _to_line(part)
        parts.append(f"{_to_line(name)}: {text}")
    return f"{{{_join(parts)}}}\n"


def _join(lines: Iterable[str]) -> str:
    """Join JSON elements so that each one has its own line."""
    return "\n" + ",\n".join(lines) + "\n"


def _round(content: Any) -> Any:
    """Round all fractional numbers to DIGITS significant digits. Digits before the decimal point are never rounded."""
    if isinstance(content, dict):
        return {key: _round(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_round(value) for value in content]
    if isinstance(content, float) and content:
        return round(content, max(0, DIGITS - 1 - math.floor(math.log10(abs(content)))))
    return content


def _to_line(content: Any) -> str:
    text = json.dumps(content, default=str, allow_nan=False)
    return text.replace(f"{ROOT}/", "").replace(f'"{ROOT}"', '"."')
