"""What a stage has measured so far, on disk after every point: a killed run loses only the point it was at."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.common.machine import describe_machine


class Record:
    """The points of one stage in `<folder>/<stage>.json`; made where there is none, continued where there is.

    Every run that adds points adds an entry to `sessions`: date, hardware, driver, versions, commit and command. Each
    point says by number which session measured it.

    Raises:
        ValueError: the file is there, and is no record of this stage.
    """

    def __init__(self, folder: Path, stage: str, command: Sequence[str]) -> None:
        self.path = folder / f"{stage}.json"
        self._command = list(command)
        self._content: dict[str, Any] = {"stage": stage, "sessions": [], "points": {}}
        self._session: int | None = None
        if self.path.exists():
            self._content = read_record(self.path)
            if self._content["stage"] != stage:
                raise ValueError(f"{self.path}: a record of stage {self._content['stage']}; needed is one of {stage}")

    def __contains__(self, key: str) -> bool:
        return key in self._content["points"]

    @property
    def points(self) -> dict[str, Any]:
        """Key -> what was measured there."""
        return self._content["points"]

    def add(self, key: str, **measured: Any) -> None:
        """Keep a point, on disk when this returns."""
        if self._session is None:
            self._session = len(self._content["sessions"])
            self._content["sessions"].append({**describe_machine(), "command": self._command})
        self._content["points"][key] = {"session": self._session, **measured}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_suffix(".half")
        half.write_text(json.dumps(self._content, indent=1, default=str, allow_nan=False) + "\n")
        os.replace(half, self.path)


def read_record(path: Path) -> dict[str, Any]:
    """A record as it was written. Raises ValueError where the file holds something else."""
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}; needed is a record of `make gpu`, or no such file") from None
    if not isinstance(content, dict) or not {"stage", "sessions", "points"} <= content.keys():
        raise ValueError(f"{path}: not a record of `make gpu`; needed is one, or no such file")
    return content
