"""The table of a record of findings."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.common.plot import save_figure
from benchmark.common.record import Record
from benchmark.common.table import Table
from benchmark.quality.findings.finding import Finding

WORDS = {True: "agrees", False: "differs", None: "open"}
NOTE = "Open: within two standard errors. mnats: thousandths of a nat a token."


def tabulate_findings(points: Mapping[str, Any]) -> Table:
    """A row a claim: what the paper says, what was measured here, and whether that agrees."""
    rows = [
        [point["source"], verdict["claim"], verdict["measured"], WORDS[verdict["agrees"]]]
        for point in points.values()
        for verdict in point["verdicts"]
    ]
    return Table("The papers' claims", ["paper", "claim", "measured here", ""], rows, NOTE, text_columns=4)


def keep_finding(finding: Finding, record: Record, out: Path) -> None:
    """Print its table, write its plot, and keep it in the record."""
    Table(f"{finding.title} ({finding.source})", finding.headings, finding.rows).show()
    save_figure(finding.figure, out / f"{finding.name}.png")
    verdicts = [asdict(verdict) for verdict in finding.verdicts]
    record.add(finding.name, source=finding.source, numbers=finding.numbers, verdicts=verdicts)
