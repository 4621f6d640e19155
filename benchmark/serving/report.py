"""The table of a record of served policies: what each gains beside what it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmark.common.comparison import NO_STEP, ONE_ROUND, Comparison, format_experts, format_number, format_spread
from benchmark.common.rounds import Series
from benchmark.common.speculative import DRAFTING
from benchmark.common.table import Table
from benchmark.quality.measure import compare_loss

SUMMARY = ("off", "xshare:k0=1,add=24", f"{DRAFTING}xshare")
"""The rows that the README shows."""
KEY = "comparison"
"""Of the rounds in the record; `quality_key` gives the others."""
NOTE = """\
Medians over the rounds [lower, upper quartile]. Ratio: of output tokens/s to the first row's, within each round, the
highest first. Active experts, a layer and step, upstream's -> the policy's, and kept mass: counted by the server."""
QUALITY = """\
Loss: nats a token of held-out text, the domains mixed, forced through the server's own decode steps; of a policy what
it adds to the first row's, ± the standard error. Sums right: share of arithmetic problems."""
DRAFTS = """\
Accepted: tokens a verification step, the last of them the target's own. Where drafts are verified, each token is forced
before a verification step, and losses compare with that of the first such row alone."""


def quality_key(name: str) -> str:
    """The key of a row's loss and sums."""
    return f"quality/{name}"


def tabulate_serving(points: Mapping[str, Any]) -> Table:
    """A row a policy: the baseline, then without drafts and with them, the highest ratio first."""
    comparison = Comparison.read(points[KEY])
    drafts = [bool(one.variant.args) for one in comparison.series]
    order = sorted(comparison.order, key=lambda number: (number > 0, drafts[number]))
    losses = _format_losses(points, comparison.series)
    rows = []
    for number in order:
        row, active = comparison.summaries[number], comparison.active[number]
        quality = points.get(quality_key(row.name), {})
        rows.append(
            [
                row.name,
                format_spread(row.paired_ratio, 2),
                format_spread(row.throughput, 0),
                format_number(active, 1) if row.experts_after is None else format_experts(row),
                format_number(1.0 if row.kept_mass is None else row.kept_mass, 3),
                losses[number],
                format_number(quality.get("sums"), 3),
                format_number(row.accept_length, 2),
            ]
        )
    headings = ("policy", "ratio", "tokens/s", "active experts", "kept mass", "loss, nats", "sums right", "accepted")
    kept = [column for column in range(len(headings)) if any(row[column] != "-" for row in rows)]
    idle = f"{NO_STEP}: {', '.join(comparison.idle)}." if comparison.idle else ""
    note = (
        f"{comparison.workload.model.name}: {comparison.workload}.",
        NOTE,
        QUALITY if set(losses) != {"-"} else "",
        DRAFTS if any(drafts) else "",
        idle,
        ONE_ROUND if comparison.rounds == 1 else "",
    )
    shown = [[row[column] for column in kept] for row in rows]
    title = "Policies served side by side"
    return Table(title, [headings[column] for column in kept], shown, " ".join(filter(None, note)))


def summarize_serving(points: Mapping[str, Any]) -> Table:
    """Of that table the baseline, the default policy, and the policy with drafts, beside what drafts alone come to."""
    table = tabulate_serving(points)
    rows = {row[0]: row for row in table.rows}
    alone = f"Without a policy EAGLE-3 has the ratio {rows[f'{DRAFTING}off'][1]}."
    return replace(table, rows=[rows[name] for name in SUMMARY], note=f"{table.note} {alone}")


def _format_losses(points: Mapping[str, Any], series: Sequence[Series]) -> list[str]:
    """Of each row: of the first one with drafts and the first one without the loss, of the others what they add."""
    first: dict[bool, torch.Tensor] = {}
    cells = []
    for one in series:
        point = points.get(quality_key(one.variant.name))
        if point is None:
            cells.append("-")
            continue
        nats = torch.tensor(point["nats"])[:, None]
        reference = first.setdefault(bool(one.variant.args), nats)
        loss = compare_loss(nats, reference)
        cells.append(f"{loss.cross_entropy:.3f}" if reference is nats else f"{loss.delta:+.3f} ± {loss.error:.3f}")
    return cells
