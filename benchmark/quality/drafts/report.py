"""The table of simulated verification."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmark.common.table import Table
from benchmark.quality.drafts.layout import OWN, Drafted
from benchmark.quality.equal_loss import experts_for, find_interval, format_share

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
"""The additional policy keys of each kind of setting."""
LEVELS = (0.02, 0.01)
"""The losses at which active experts are compared, in nats per token."""
NOTE = """\
Active experts a layer and step at which emitted tokens lose so many nats a token above vanilla, interpolated between
two budgets; in brackets the change from plain, with its 95 % interval over draws of the batches if the record has the
loss of each. A dash: beyond the measured budgets. Each draft is right with this chance if all drafts before it are
right; after ±, each draft has a chance of its own, evenly distributed around this chance. Rows after a wrong draft hold
other text and do not count. By its own chance: weighed by each draft's own chance. Told: the selection gets the rows
that will be emitted, which no server can predict: a bound of what weights can reach. Settings:
xshare:k0=1,utility=squared,own_share=0.75 and a budget add. The mean standard error of a loss is {error:.4f}."""
Ladder = Sequence[Mapping[str, Any]]
"""The points of one layout and kind, sorted by active experts."""


def tabulate_drafts(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each layout and loss, and one column for each kind of setting.

    A cell contains the number of active experts at this loss.
    """
    ladders: dict[Drafted, dict[str, list[Mapping[str, Any]]]] = {}
    for point in points.values():
        layout = Drafted(point["batch"], point["tokens_per_request"], point["chance"], point["spread"])
        ladders.setdefault(layout, {}).setdefault(point["kind"], []).append(point)
    rows = []
    for layout, kinds in ladders.items():
        for found in kinds.values():
            found.sort(key=lambda point: point["active_experts"])
        vanilla = kinds["plain"][0]["vanilla_active"]
        for level in LEVELS:
            cells = [_cell(level, kinds.get(kind, []), kinds["plain"]) for kind in KINDS]
            rows.append([str(layout), f"{vanilla:.1f}", f"+{level:g}", *cells])
    error = fmean(point["loss"]["error"] for point in points.values())
    headings = ["a step", "vanilla's", "loss", *KINDS]
    return Table("Experts at equal loss of emitted tokens", headings, rows, NOTE.format(error=error), text_columns=1)


def _cell(level: float, ladder: Ladder, plain: Ladder) -> str:
    def need(some: Ladder, losses: Sequence[float]) -> float | None:
        return experts_for(level, [(one["active_experts"], loss) for one, loss in zip(some, losses, strict=True)])

    def change(losses: Sequence[float]) -> float | None:
        needed, whole = need(ladder, losses[: len(ladder)]), need(plain, losses[len(ladder) :])
        return None if needed is None or whole is None else needed / whole - 1

    needed = need(ladder, [one["loss"]["delta"] for one in ladder])
    share = change([one["loss"]["delta"] for one in (*ladder, *plain)])
    if needed is None:
        return "-"
    if ladder is plain or share is None:
        return f"{needed:.1f}"
    losses = [one["losses"] for one in (*ladder, *plain) if "losses" in one]  # records before 2026-11-28 have no losses
    return f"{needed:.1f} ({format_share(share, find_interval(losses, change) if losses else None)})"
