"""A record of simulated verification: the table."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmark.common.table import Table
from benchmark.quality.drafts.layout import OWN, Drafted
from benchmark.quality.front.report import experts_for

BY_OWN, TOLD = "by its own chance", "told"
KINDS = {
    "plain": "",
    "weighed by 0.5": ",acceptance=0.5",
    "weighed by 0.75": ",acceptance=0.75",
    "weighed by 0.9": ",acceptance=0.9",
    "by 0.75, 4 warm rows": ",acceptance=0.75,warm_rows=4",
    BY_OWN: f",acceptance={OWN}",
    TOLD: "",
}
"""What a setting has besides its budget, by name."""
LEVELS = (0.02, 0.01)
"""Of loss, nats a token."""
NOTE = """\
Active experts a layer and step at which emitted tokens lose so many nats a token above vanilla, on the line between two
budgets; in brackets the change from plain; a dash beyond the budgets measured. Each draft is right with the chance
said if all before it are, or, after ±, with one of its own evenly distributed around that; rows behind a wrong one hold
other text, and nothing of them counts. By its own chance: weighed by what each draft really has. Told: only rows that
will be emitted are looked at, which no server knows; what weights could reach at best. Settings:
xshare:k0=1,utility=squared,own_share=0.75 and a budget add. A loss's standard error is {error:.4f} in the mean."""


def tabulate_drafts(points: Mapping[str, Any]) -> Table:
    """A row a layout and level, a column a kind: the experts needed."""
    curves: dict[Drafted, dict[str, list[tuple[float, float]]]] = {}
    vanilla = {}
    for point in points.values():
        layout = Drafted(point["batch"], point["tokens_per_request"], point["chance"], point["spread"])
        vanilla[layout] = point["vanilla_active"]
        found = curves.setdefault(layout, {}).setdefault(point["kind"], [])
        found.append((point["active_experts"], point["loss"]["delta"]))
    rows = []
    for layout, kinds in curves.items():
        for level in LEVELS:
            needed = {kind: experts_for(level, sorted(curve)) for kind, curve in kinds.items()}
            cells = [_cell(needed.get(kind), needed["plain"]) for kind in KINDS]
            rows.append([str(layout), f"{vanilla[layout]:.1f}", f"+{level:g}", *cells])
    error = fmean(point["loss"]["error"] for point in points.values())
    headings = ["a step", "vanilla's", "loss", *KINDS]
    return Table("Experts at equal loss of emitted tokens", headings, rows, NOTE.format(error=error), text_columns=1)


def _cell(needed: float | None, plain: float | None) -> str:
    if needed is None:
        return "-"
    return f"{needed:.1f}" if plain is None or needed == plain else f"{needed:.1f} ({needed / plain - 1:+.0%})"
