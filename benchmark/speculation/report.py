"""The table of a record of policies that verify drafts."""

from collections.abc import Mapping
from typing import Any

from benchmark.common.comparison import Comparison, tabulate
from benchmark.common.speculative import DRAFTING
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE, OFF

ROUNDS, SUMS = "rounds", "sums"
"""Keys of the record; `loss_key` gives the others."""
NOTE = """\
Accepted: tokens a verification step, the last of them the target's own. Sums right: of arithmetic problems the server
answers. Loss: cross-entropy above vanilla's, in thousandths of a nat a token, of held-out text whose steps are laid out
as verification, the domains mixed."""


def loss_key(policy: str) -> str:
    """The key of a policy's quality in the record."""
    return f"loss/{policy}"


def read_comparison(points: Mapping[str, Any]) -> Comparison:
    """The rounds, and beside each variant what it costs."""
    names = [series["variant"]["name"].removeprefix(DRAFTING) for series in points[ROUNDS]["series"]]
    losses = [_format_loss(None if name == OFF else points[loss_key(name)], name) for name in names]
    columns = {"sums right": [_format_share(share) for share in points[SUMS]["shares"]], "loss, mnats": losses}
    return Comparison.read(points[ROUNDS], columns)


def tabulate_speculation(points: Mapping[str, Any]) -> Table:
    """A row a variant: without drafts, with EAGLE-3, and with EAGLE-3 under every policy."""
    return tabulate("Policies that verify the drafts of EAGLE-3", [read_comparison(points)], NOTE)


def _format_loss(point: Mapping[str, Any] | None, name: str) -> str:
    if point is None:
        return "-"
    loss = point["mixed"]["loss"]["all"]
    return "0" if name == BASELINE else f"{loss['delta'] * 1000:+.1f} ± {loss['error'] * 1000:.1f}"


def _format_share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
