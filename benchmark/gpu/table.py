"""What was measured beside its bar: the table of a results folder, printed and written to summary.md."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from pathlib import Path
from statistics import stdev
from typing import Any

from benchmark.common.machine import format_machine
from benchmark.common.record import last_session, read_record
from benchmark.common.table import Table
from benchmark.gpu.checks import FAILED

EXPERIMENTS = ("caches", "selection", "levers", "layer", "server", "eagle3", "replay", "tune", "routing", "paged")
"""Each is the module of that name: `measure(record, parts)` and `rows(points)`."""
RECORDS = ("run", *EXPERIMENTS)
"""In the order of the table; `run` holds what was checked beforehand and how every task ended."""
HEADINGS = ("experiment", "what", "runner", "measured", "bar", "")


@dataclass(frozen=True)
class Row:
    """One line. `passed`: None without a bar; `is_open`: it lies within the error; `runner`: the MoE's."""

    what: str
    measured: str
    bar: str = ""
    passed: bool | None = None
    is_open: bool = False
    runner: str = ""

    @property
    def verdict(self) -> str:
        """ "pass", "miss" or "open"; nothing where there is no bar."""
        if self.passed is None:
            return ""
        return "open" if self.is_open else "pass" if self.passed else "miss"


def find_error(values: Sequence[float]) -> float:
    """Return two standard errors of the mean of at least two values."""
    return 2 * stdev(values) / sqrt(len(values))


def at_least(what: str, value: float, bar: float | None, unit: str, error: float | None = 0.0) -> Row:
    """A value, whose bar is a lower limit. `error` in its unit; where it is None, unknown, no bar is decided."""
    doubt = " ± unknown" if error is None else f" ± {error:.1f}" if error else ""
    measured = f"{value:.1f}{doubt} {unit}"
    if bar is None:
        return Row(what, measured)
    is_open = error is None or abs(value - bar) < error
    return Row(what, measured, f"at least {bar:g} {unit}", value >= bar, is_open)


def at_most(what: str, value: float, bar: float | None, unit: str) -> Row:
    """Return a value whose bar is an upper limit."""
    measured = f"{value:.1f} {unit}"
    return Row(what, measured) if bar is None else Row(what, measured, f"at most {bar:g} {unit}", value <= bar)


def check_row(what: str, point: Mapping[str, Any], measured: str = "passed") -> Row:
    """Of a check recorded as `passed`, else with its `reason`."""
    return Row(what, measured if point["passed"] else str(point["reason"]), "passed", bool(point["passed"]))


def list_rows(results: Path) -> list[tuple[str, Row]]:
    """(experiment, row) of all that left a record in the folder; a record that cannot be read is a miss of its own."""
    found = []
    for experiment, path in _list_records(results).items():
        try:
            points: Mapping[str, dict] = read_record(path, experiment)["points"]
            rows = [*import_module(f"benchmark.gpu.{experiment}").rows(points), *_failed_rows(points)]
        except Exception as error:  # of one record; the table shows the others
            rows = [Row("its record", f"{type(error).__name__}: {error}", "can be read", False)]
        found += [(experiment, row) for row in rows]
    return found


def _failed_rows(points: Mapping[str, Any]) -> list[Row]:
    """The points that could not be measured, and have not been since."""
    failed = {key.removeprefix(FAILED): point for key, point in points.items() if key.startswith(FAILED)}
    return [Row(key, point["reason"], "measured", False) for key, point in failed.items() if key not in points]


def show_table(results: Path) -> None:
    """Print the table of a results folder and write it to summary.md there. Raises ValueError without a record."""
    rows = list_rows(results)
    if not rows:
        raise ValueError(f"results {results}: no record with a point there; needed is a folder that `make gpu` wrote")
    cells = [[experiment, row.what, row.runner, row.measured, row.bar, row.verdict] for experiment, row in rows]
    table = Table(_describe(results), HEADINGS, cells, text_columns=len(HEADINGS))
    table.show()
    (results / "summary.md").write_text(f"# {table.title}\n\n{table.to_markdown()}\n")


def _list_records(results: Path) -> dict[str, Path]:
    paths = {experiment: results / f"{experiment}.json" for experiment in RECORDS}
    return {experiment: path for experiment, path in paths.items() if path.exists()}


def _describe(results: Path) -> str:
    """Where it was measured, from the records' last sessions: all of one folder come from one machine."""
    sessions = []
    for path in _list_records(results).values():
        with suppress(ValueError):  # `list_rows` says so
            sessions.append(last_session(read_record(path)))
    return format_machine(max(sessions, key=lambda session: session["date"])) if sessions else "no record can be read"
