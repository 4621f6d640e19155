"""Pages with marked tables: between `<!-- table: NAME -->` and `<!-- end table -->` is a table of the records."""

import re
from collections.abc import Iterator
from pathlib import Path

from benchmark.common.paths import ROOT
from benchmark.records.tables import format_table

BEGIN, END = re.compile(r"<!-- table: (.*) -->"), "<!-- end table -->"


def list_pages() -> list[Path]:
    """Return every page that may hold a table."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmark").rglob("*.md"))]


def write_tables(pages: list[Path], results: Path) -> list[str]:
    """Write every marked table anew; return a line for each wrong marker."""
    problems = []
    for page in pages:
        text = page.read_text()
        new, _, found = _render(page, text, results)
        problems += found
        if new != text:
            page.write_text(new)
    return problems


def check_tables(pages: list[Path], results: Path) -> list[str]:
    """Return a line for every table that differs from its record, and for every wrong marker."""
    problems = []
    for page in pages:
        _, changed, found = _render(page, page.read_text(), results)
        problems += found
        problems += [
            f"{page}: table {name}: differs from its record; python -m benchmark.records --tables writes it"
            for name in changed
        ]
    return problems


def _render(page: Path, text: str, results: Path) -> tuple[str, list[str], list[str]]:
    """Return the page with its tables written anew, the names of those that change, and the problems."""
    lines: list[str] = []
    changed: list[str] = []
    problems: list[str] = []
    marked = iter(text.split("\n"))
    for line in marked:
        lines.append(line)
        if (begin := BEGIN.fullmatch(line)) is None:
            continue
        old = _take_table(marked)
        if old is None:
            return text, [], [*problems, f"{page}: table {begin[1]}: no {END} below it"]
        try:
            new = format_table(begin[1], results, page).split("\n")
        except ValueError as error:
            problems.append(f"{page}: table {begin[1]}: {error}")
            new = old
        if new != old:
            changed.append(begin[1])
        lines += [*new, END]
    return "\n".join(lines), changed, problems


def _take_table(lines: Iterator[str]) -> list[str] | None:
    """Return the lines up to the end marker, and consume it; None if the next table comes first."""
    taken: list[str] = []
    for line in lines:
        if line == END:
            return taken
        if BEGIN.fullmatch(line):
            return None
        taken.append(line)
    return None
