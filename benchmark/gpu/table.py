"""What was measured beside its bar: the table of a results folder, printed and written to summary.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from benchmark.common.machine import format_machine
from benchmark.common.record import last_session, read_record
from benchmark.common.table import Table

EXPERIMENTS = ("selection", "layer", "server", "eagle3", "replay", "tune")
"""In the order of a whole run. Each is the module of that name: `measure(record, models)` and `rows(points)`."""
HEADINGS = ("experiment", "what", "measured", "bar", "")


@dataclass(frozen=True)
class Row:
    """One line. `passed` is None where there is no bar."""

    what: str
    measured: str
    bar: str = ""
    passed: bool | None = None

    @property
    def verdict(self) -> str:
        """ "pass", "miss", or nothing where there is no bar."""
        return "" if self.passed is None else "pass" if self.passed else "miss"


def at_least(what: str, value: float, bar: float | None, unit: str) -> Row:
    """A value whose bar, if it has one, is a lower limit."""
    if bar is None:
        return Row(what, f"{value:.1f} {unit}")
    return Row(what, f"{value:.1f} {unit}", f"at least {bar:g} {unit}", value >= bar)


def list_rows(results: Path) -> list[tuple[str, Row]]:
    """(experiment, row) of all that left a record in the folder. Raises ValueError for a broken record."""
    found = []
    for experiment, path in _list_records(results).items():
        points: Mapping[str, dict] = read_record(path, experiment)["points"]
        found += [(experiment, row) for row in import_module(f"benchmark.gpu.{experiment}").rows(points)]
    return found


def show_table(results: Path) -> None:
    """Print the table of a results folder and write it to summary.md there. Raises ValueError without a record."""
    rows = list_rows(results)
    if not rows:
        raise ValueError(f"results {results}: no record with a point there; needed is a folder that `make gpu` wrote")
    cells = [[experiment, row.what, row.measured, row.bar, row.verdict] for experiment, row in rows]
    table = Table(_describe(results), HEADINGS, cells, text_columns=len(HEADINGS))
    table.show()
    (results / "summary.md").write_text(f"# {table.title}\n\n{table.to_markdown()}\n")


def _list_records(results: Path) -> dict[str, Path]:
    paths = {experiment: results / f"{experiment}.json" for experiment in EXPERIMENTS}
    return {experiment: path for experiment, path in paths.items() if path.exists()}


def _describe(results: Path) -> str:
    """Where it was measured, from the records' last sessions: all of one folder come from one machine."""
    sessions = [last_session(read_record(path)) for path in _list_records(results).values()]
    return format_machine(max(sessions, key=lambda session: session["date"]))
