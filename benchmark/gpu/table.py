"""A table of all GPU measurements in a results folder, together with their target values (bars)."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmark.common.machine import format_machine
from benchmark.common.record import last_session, read_record
from benchmark.common.table import Table
from benchmark.gpu.checks import FAILED

EXPERIMENTS = ("caches", "selection", "levers", "layer", "server", "eagle3", "replay", "tune", "routing")
"""The experiments. Each one is a module with `PARTS`, `rows(points)` and `measure(record, parts)`."""
RECORDS = ("run", *EXPERIMENTS)
"""The records in the order of the table. The record `run` contains the checks and the result of every task."""
HEADINGS = ("experiment", "what", "runner", "measured", "bar", "")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    The bar is the value to reach. `passed` is None if there is no bar. `is_open` is true if the measured value is
    closer to the bar than its error, so the result is undecided. `runner` is the MoE runner.
    """

    what: str
    measured: str
    bar: str = ""
    passed: bool | None = None
    is_open: bool = False
    runner: str = ""

    @property
    def verdict(self) -> str:
        """Return "pass", "miss" or "open", or an empty string if there is no bar."""
        if self.passed is None:
            return ""
        return "open" if self.is_open else "pass" if self.passed else "miss"


def at_least(what: str, value: float, bar: float | None, unit: str, error: float | None = 0.0) -> Row:
    """Return a row for a value whose bar is a lower limit.

    `error` is half the width of the value's interval. If it is None, the error is unknown and the verdict is open.
    """
    doubt = " ± unknown" if error is None else f" ± {error:.1f}" if error else ""
    measured = f"{value:.1f}{doubt} {unit}"
    if bar is None:
        return Row(what, measured)
    is_open = error is None or abs(value - bar) < error
    return Row(what, measured, f"at least {bar:g} {unit}", value >= bar, is_open)


def at_most(what: str, value: float, bar: float | None, unit: str) -> Row:
    """Return a row for a value whose bar is an upper limit."""
    measured = f"{value:.1f} {unit}"
    return Row(what, measured) if bar is None else Row(what, measured, f"at most {bar:g} {unit}", value <= bar)


def check_row(what: str, point: Mapping[str, Any], measured: str = "passed") -> Row:
    """Return a row for a check. If the check failed, the row shows the reason."""
    return Row(what, measured if point["passed"] else str(point["reason"]), "passed", bool(point["passed"]))


def list_rows(results: Path) -> list[tuple[str, Row]]:
    """Return the rows of all records in a folder, each with the name of its experiment.

    If a record cannot be read, its only row is a miss.
    """
    found = []
    for experiment, path in _list_records(results).items():
        try:
            points: Mapping[str, Any] = read_record(path, experiment)["points"]
            rows = list(import_module(f"benchmark.gpu.{experiment}").rows(points))
            failed = {key.removeprefix(FAILED): point for key, point in points.items() if key.startswith(FAILED)}
            rows += [Row(key, one["reason"], "measured", False) for key, one in failed.items() if key not in points]
        except Exception as error:  # one bad record must not hide the others
            rows = [Row("its record", f"{type(error).__name__}: {error}", "can be read", False)]
        found += [(experiment, row) for row in rows]
    return found


def show_table(results: Path) -> None:
    """Print the table of a results folder and write it to summary.md. Raises ValueError if there is no record."""
    rows = list_rows(results)
    if not rows:
        raise ValueError(
            f"RESULTS must be a folder with records of `make gpu` (got {results}: no record with a point there)"
        )
    cells = [[experiment, row.what, row.runner, row.measured, row.bar, row.verdict] for experiment, row in rows]
    table = Table(_describe(results), HEADINGS, cells, text_columns=len(HEADINGS))
    table.show()
    (results / "summary.md").write_text(f"# {table.title}\n\n{table.to_markdown()}\n")


def _list_records(results: Path) -> dict[str, Path]:
    paths = {experiment: results / f"{experiment}.json" for experiment in RECORDS}
    return {experiment: path for experiment, path in paths.items() if path.exists()}


def _describe(results: Path) -> str:
    """Return the machine of the newest session. All records of a folder come from the same machine."""
    sessions = []
    for path in _list_records(results).values():
        with suppress(ValueError):  # a row of `list_rows` shows the error
            sessions.append(last_session(read_record(path)))
    return format_machine(max(sessions, key=lambda session: session["date"])) if sessions else "no record can be read"
