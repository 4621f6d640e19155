"""The table of a record of findings."""

from collections.abc import Mapping
from typing import Any

from benchmark.common.table import Table

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
