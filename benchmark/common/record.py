"""The measurements of an experiment, on disk after every point: a killed run loses only its current point."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.common.machine import describe_machine
from benchmark.common.paths import ROOT

FIELDS = {"experiment", "arguments", "sessions", "points"}
DIGITS = 6  # digits of a measured number: more than a table shows, and a fifth less to store than all


class Record:
    """The points of one experiment in `<folder>/<experiment>.json`, a point a line.

    `arguments` must be the same for a record to be continued. Every run that adds points adds an entry to `sessions`:
    date, hardware, versions, commit and command; each point has the number of its session. Paths below the checkout
    are relative to it, measured numbers have DIGITS digits.

    With `resume` the existing record is continued, else the first point replaces it. Raises ValueError if the existing
    file is no record, or one of another experiment or of other arguments.
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
        """Return the whole record, as `read_record` does."""
        return self._content

    @property
    def points(self) -> dict[str, Any]:
        """Return the measurements by key."""
        return self._content["points"]

    def add(self, key: str, **measured: Any) -> None:
        """Write a point to disk; it replaces a point of the same key."""
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
    """Return a record, with FIELDS. Raises ValueError if the file holds something else."""
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
    """Return the newest session of a record."""
    return max(content["sessions"], key=lambda session: session["date"])


def format_record(content: Mapping[str, Any]) -> str:
    """Return the JSON of a record, with a line for its arguments, for each session and for each point."""
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
    """Return JSON elements, each on a line of its own."""
    return "\n" + ",\n".join(lines) + "\n"


def _round(content: Any) -> Any:
    """Return JSON whose numbers have DIGITS digits, or all digits before the point."""
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
