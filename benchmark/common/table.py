"""A table, for the terminal and as Markdown."""

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
    """Rows of text under headings; the first `text_columns` hold words, the others numbers; `note` is below."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text_columns: int = 1

    def show(self, record: Path | None = None) -> None:
        """Print the table, and the path of its `record`. In a narrow terminal, lines are as long as the rows."""
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
        """Return the rows in GitHub's Markdown, and the note below, without the title: a page has its own headings."""
        rule = ["---" if index < self.text_columns else "---:" for index in range(len(self.headings))]
        lines = [self.headings, rule, *self.rows]
        text = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
        return f"{text}\n\n{textwrap.fill(self.note, NOTE_WIDTH)}" if self.note else text
