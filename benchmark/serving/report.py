"""The table of a record of served policies."""

from collections.abc import Mapping
from typing import Any

from benchmark.common.comparison import Comparison, tabulate
from benchmark.common.table import Table

KEY = "comparison"
"""Of the record's one point."""


def tabulate_serving(points: Mapping[str, Any]) -> Table:
    """A row a policy."""
    return tabulate("Policies served side by side", [Comparison.read(points[KEY])])
