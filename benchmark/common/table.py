"""A table that can be printed in the terminal or written as Markdown."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box, table
from rich.console import Console
from rich.text import Text

WIDEST, NOTE_WIDTH = 400, 120


@dataclass(frozen=True)
class Table:
    """A table with a note below it.

    The first `text_columns` columns contain words and are aligned to the left. The other columns contain numbers and
    are aligned to the right.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text_columns: int = 1

    def show(self, record: Path | None = None) -> None:
        """Print the table and the path of its record. Lines can be longer than the terminal is wide."""
        drawn = table.Table(title=Text(self.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for index, heading in enumerate(self.headings):
            drawn.add_column(Text(heading), justify="left" if index < self.text_columns else "right")
        for row in self.rows:
            drawn.add_row(*map(Text, row))  # rich interprets brackets in plain strings
        console = Console()
        needed = console.measure(drawn, options=console.options.update(width=WIDEST)).maximum
        console.width = max(console.width, min(needed, WIDEST))
        console.print(drawn)
        if self.note:
            print(textwrap.fill(self.note, NOTE_WIDTH))
        if record:
            print(f"Record: {record}")

    def to_markdown(self) -> str:
        """Return the table and its note in GitHub's Markdown. The title is omitted, because a page has headings."""
        rule = ["---" if index < self.text_columns else "---:" for index in range(len(self.headings))]
        lines = [self.headings, rule, *self.rows]
        text = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
        return f"{text}\n\n{textwrap.fill(self.note, NOTE_WIDTH)}" if self.note else text
