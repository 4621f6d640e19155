"""What was measured beside its bar: the table of a results folder, printed and written to summary.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmark.gpu.record import read_record

STAGES = ("selection", "layer", "server", "eagle3", "replay", "align", "tune")
"""In the order of a whole run. A stage is the module of that name: `measure(record, models)` and `rows(points)`."""
HEADINGS = ("stage", "what", "measured", "bar", "")
WIDTH = 120


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
    """(stage, row) of every stage that left a record in the folder. Raises ValueError for a broken record."""
    found = []
    for stage, path in _list_records(results).items():
        points: Mapping[str, dict] = read_record(path)["points"]
        found += [(stage, row) for row in import_module(f"benchmark.gpu.{stage}").rows(points)]
    return found


def show_table(results: Path) -> None:
    """Print the table of a results folder and write it to summary.md there. Raises ValueError without a record."""
    rows = list_rows(results)
    if not rows:
        raise ValueError(f"results {results}: no record with a point there; needed is a folder that `make gpu` wrote")
    title = _describe(results)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold")
    for stage, row in rows:
        table.add_row(stage, row.what, row.measured, row.bar, row.verdict)
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(table)
    (results / "summary.md").write_text(_format_markdown(title, rows))


def _list_records(results: Path) -> dict[str, Path]:
    paths = {stage: results / f"{stage}.json" for stage in STAGES}
    return {stage: path for stage, path in paths.items() if path.exists()}


def _describe(results: Path) -> str:
    """Where it was measured, from the records' last sessions: all of one folder come from one machine."""
    records = [read_record(path) for path in _list_records(results).values()]
    last = max((session for record in records for session in record["sessions"]), key=lambda one: one["date"])
    versions = ", ".join(f"{name} {last['versions'][name]}" for name in ("sglang", "torch", "triton"))
    return f"{last['date']}, {last['hardware']['gpu']}, {versions}, commit {last['commit'] or 'unknown'}"


def _format_markdown(title: str, rows: Sequence[tuple[str, Row]]) -> str:
    lines = [f"# {title}", "", f"| {' | '.join(HEADINGS)} |", "| --- " * len(HEADINGS) + "|"]
    lines += [f"| {stage} | {row.what} | {row.measured} | {row.bar} | {row.verdict} |" for stage, row in rows]
    return "\n".join(lines) + "\n"
