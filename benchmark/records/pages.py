"""Generated tables in Markdown pages. A table stands between `<!-- table: NAME -->` and `<!-- end table -->`."""

import re
from collections.abc import Iterator
from pathlib import Path

from benchmark.common.paths import ROOT
from benchmark.records.tables import format_table

BEGIN, END = re.compile(r"<!-- table: (.*) -->"), "<!-- end table -->"


def list_pages() -> list[Path]:
    """Return all pages that can contain generated tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmark").rglob("*.md"))]


def write_tables(pages: list[Path], results: Path) -> list[str]:
    """Generate all tables in the pages again. Return one line for each wrong marker."""
    problems = []
    for page in pages:
        text = page.read_text()
        new, _, found = _render(page, text, results)
        problems += found
        if new != text:
            page.write_text(new)
    return problems


def check_tables(pages: list[Path], results: Path) -> list[str]:
    """Return one line for each table that differs from its record, and one for each wrong marker."""
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
    """Generate the tables of the page again. Return the page, the names of the changed tables, and the problems."""
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
    """Return the lines before the end marker. Return None if another table begins before an end marker."""
    taken: list[str] = []
    for line in lines:
        if line == END:
            return taken
        if BEGIN.fullmatch(line):
            return None
        taken.append(line)
    return None
