"""A table of active experts on expert-parallel ranks."""

from collections.abc import Mapping
from typing import Any

from benchmark.balance.logits import FITTED
from benchmark.common.table import Table

NOTE = """\
Made-up router logits for 256 experts, top-8, and a sigmoid router with 8 groups, one group a rank. They are fitted so
that vanilla has as many active experts as XShare's Table 2: {paper}. Fullest rank: active experts of the rank with the
most, which a step waits for, ± the standard error; in brackets relative to vanilla. Kept mass: mean of all rows. Least
kept: mean of the twentieth of rows with the least. Policies joined by / take layers in turn."""


def tabulate_balance(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each policy. It shows the results for each number of rows."""
    baseline = next(iter(points.values()))["rows"]
    sizes = list(baseline)
    kinds = ("fullest rank", "active", "kept mass", "least kept")
    headings = ["policy", *(f"{rows} rows: {kind}" for rows in sizes for kind in kinds)]
    rows = [
        [policy, *(cell for size in sizes for cell in _cells(point["rows"][size], baseline[size]))]
        for policy, point in points.items()
    ]
    paper = ", ".join(
        f"{FITTED[int(size)].paper[0]} experts, {FITTED[int(size)].paper[1]} on the fullest rank at {size}"
        for size in sizes
    )
    return Table("Experts on expert-parallel ranks", headings, rows, NOTE.format(paper=f"{paper} rows"))


def _cells(figures: Mapping[str, float], baseline: Mapping[str, float]) -> list[str]:
    share = figures["fullest_rank"] / baseline["fullest_rank"]
    return [
        f"{figures['fullest_rank']:.2f} ± {figures['fullest_rank_error']:.2f} ({share:.2f})",
        f"{figures['active_experts']:.1f}",
        f"{figures['kept_mass']:.3f}",
        f"{figures['least_kept_mass']:.3f}",
    ]
