"""A record of paged experts on paper."""

from collections.abc import Mapping
from typing import Any

from benchmark.common.table import Table
from benchmark.common.variant import BASELINE
from benchmark.paged.settings import shorten
from benchmark.quality.report import format_loss

NOTE = """\
Page-ins a layer and step, in brackets times vanilla's, at the loss in nats a token above vanilla's on
the same tokens, ± the standard error. All but vanilla with utility=squared,own_share=0.75."""
BARS = (0.30, 0.005), (0.22, 0.01)
"""(page-ins over vanilla's, nats) of 16 rows where half of the experts have slots: at most both."""
BARRED = 16, 32
Points = Mapping[str, Mapping[str, Any]]


def tabulate_paged(points: Points) -> Table:
    """A row a number of slots and policy, a column a number of rows."""
    found = {(one["slots"], one["policy"], one["rows"]): one for one in points.values()}
    sizes = sorted({one["rows"] for one in points.values()})
    rows = []
    for slots, policy in dict.fromkeys(key[:2] for key in found):
        cells = []
        for size in sizes:
            point, vanilla = (found.get((slots, name, size)) for name in (policy, BASELINE))
            cells.append(_cell(point, vanilla) if point and vanilla else "")
        rows.append([str(slots), shorten(policy), *cells])
    headings = ["slots", "policy", *(f"{size} rows" if size > 1 else "1 row" for size in sizes)]
    note = " ".join([NOTE, *(judge(points, *bar) for bar in BARS)])
    return Table("Page-ins and loss with paged experts", headings, rows, note, text_columns=2)


def judge(points: Points, most: float, tolerated: float) -> str:
    """What the least loss with at most a share of vanilla's page-ins is, beside what was aimed at."""
    same = [one for one in points.values() if (one["rows"], one["slots"]) == BARRED]
    vanilla = next((one["page_ins"] for one in same if one["policy"] == BASELINE), 0.0)
    within = [one for one in same if one["page_ins"] <= most * vanilla]
    if not within:
        return ""
    best = min(within, key=lambda one: one["loss"]["delta"])
    told = f"{shorten(best['policy'])}: {best['page_ins'] / vanilla:.2f} at {format_loss(best['loss'])}"
    return f"Aimed at with 32 slots and 16 rows: at most {most:.2f} of vanilla's at {tolerated:+g} nats; {told}."


def _cell(point: Mapping[str, Any], vanilla: Mapping[str, Any]) -> str:
    page_ins, whole = point["page_ins"], vanilla["page_ins"]
    if point["policy"] == BASELINE or not whole:
        return f"{page_ins:.1f}"
    return f"{page_ins:.1f} ({page_ins / whole:.2f}) at {format_loss(point['loss'])}"
