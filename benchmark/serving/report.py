"""Tables and a picture of the served policies, and a table that compares `check`'s estimate with measured times."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmark.common.comparison import NO_STEP, ONE_ROUND, Comparison, format_experts, format_number
from benchmark.common.interval import format_rounds, format_spread, spread
from benchmark.common.plot import Line, Panel, Picture
from benchmark.common.rounds import Series
from benchmark.common.speculative import DRAFTING
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE
from benchmark.common.widened import read_widened
from benchmark.quality.measure import Loss, compare_nats, find_margin
from sglang_xshare.check.weights import Weights

SUMMARY = ("off", "xshare", f"{DRAFTING}off", f"{DRAFTING}xshare")
"""The rows that the README shows. Rows that the record does not contain are omitted."""
KEY = "comparison"
"""The key of the point that contains the rounds. `quality_key` returns the keys of the other points."""
ROUNDS = "ratio by round"
BRIEF = """\
Means over the rounds [95 % t-interval]. Ratio: tokens/s divided by the first row's. Loss: cross-entropy, nats a token;
of `xshare` the difference from `off` above. Sums right: share of arithmetic problems solved. Accepted: tokens that a
verify step gives a request.\
""".replace("\n", " ")
"""The note below the README's table."""
NOTE = """\
Means over the rounds [95 % t-interval]; the highest ratio first. Ratio: output tokens/s over the first row's in the
same round. The server counts active experts (a layer and step, upstream's routing -> the policy) and kept mass."""
BY_ROUND = "Ratio by round: in the order measured."
OWN_SERVER = "vanilla: the server of the policies, switched to vanilla."
QUALITY = """\
Loss: nats a token of held-out text of mixed domains, forced through the server's own decode steps; of a policy, the
difference from the first row ± half its 95 % t-interval over batches. Sums right: share of arithmetic problems."""
DRAFTS = """\
Accepted: tokens of a verify step, the target's own included. With drafts, each token is forced before a verify step,
and the loss of a policy is the difference from the first row with drafts."""


def quality_key(name: str) -> str:
    """Return the key of the point that contains a variant's loss and its share of solved problems."""
    return f"quality/{name}"


def tabulate_serving(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each variant, sorted by `_order`."""
    comparison = Comparison.read(points[KEY])
    losses = _format_losses(points, comparison)
    rows = []
    for number in _order(comparison):
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
                format_rounds(row.ratios, 2) if number else "-",
            ]
        )
    headings = ["policy", "ratio", "tokens/s", "active experts", "kept mass", "loss, nats", "sums right", "accepted"]
    headings.append(ROUNDS)
    kept = [column for column in range(len(headings)) if any(row[column] != "-" for row in rows)]
    note = f"{comparison.workload.model.name}: {comparison.workload}. {_explain(comparison, losses)}"
    shown = [[row[column] for column in kept] for row in rows]
    return Table("Policies served side by side", [headings[column] for column in kept], shown, note)


def _order(comparison: Comparison) -> list[int]:
    """Return the indices of the series in table order.

    The baseline is first. Variants without drafts precede variants with drafts. Within each group, the highest ratio is
    first.
    """
    drafts = [bool(one.variant.args) for one in comparison.series]
    return sorted(comparison.order, key=lambda number: (number > 0, drafts[number]))


def plot_serving(points: Mapping[str, Any]) -> Picture:
    """Return a picture of the throughput and the loss, with one bar for each variant."""
    comparison = Comparison.read(points[KEY])
    order, losses = _order(comparison), _find_losses(points, comparison)
    rows = [comparison.summaries[number].name for number in order]
    speeds = [comparison.summaries[number].throughput for number in order]
    ends = [(one.lower, one.upper) for one in speeds]
    panels = [Panel("output tokens/s", "", [Line("", [one.mean for one in speeds], [], ends)], rows=rows)]
    found = [losses[number] for number in order]
    if any(found):
        costs = Line("", [one.delta if one else 0.0 for one in found], [], [_find_bar(one) for one in found])
        panels.append(Panel("loss above that without a policy, nats a token", "", [costs], rows=rows, zero=0.0))
    note = "error bars: 95 % t-intervals, of tokens/s over rounds, of the loss over batches"
    return Picture(panels, f"{comparison.workload.model.name}: {comparison.workload}; {note}")


def _find_bar(loss: Loss | None) -> float:
    return find_margin(asdict(loss)) if loss and loss.delta else 0.0


def _explain(comparison: Comparison, losses: Sequence[str]) -> str:
    """Return the note that explains the table."""
    parts = (
        NOTE,
        BY_ROUND,
        OWN_SERVER if BASELINE in [one.variant.name for one in comparison.series[1:]] else "",
        QUALITY if set(losses) != {"-"} else "",
        DRAFTS if any(one.variant.args for one in comparison.series) else "",
        f"{NO_STEP}: {', '.join(comparison.idle)}." if comparison.idle else "",
        ONE_ROUND if comparison.rounds == 1 else "",
    )
    return " ".join(filter(None, parts))


def summarize_serving(points: Mapping[str, Any]) -> Table:
    """Return a short table for the README. It contains only the rows of `SUMMARY`, and no single rounds."""
    table, comparison = tabulate_serving(points), Comparison.read(points[KEY])
    rows = {row[0]: row[:-1] for row in table.rows}
    note = f"{comparison.workload.model.name}: {comparison.workload}. {BRIEF}"
    shown = [rows[name] for name in SUMMARY if name in rows]
    return replace(table, headings=table.headings[:-1], rows=shown, note=note)


def tabulate_verified(*records: Mapping[str, Any]) -> Table:
    """Return one table of all records. The first column contains the size of the record's verify step."""
    tables = [tabulate_serving(points) for points in records]
    comparisons = [Comparison.read(points[KEY]) for points in records]
    rows = [[_name_step(one), *row] for one, table in zip(comparisons, tables, strict=True) for row in table.rows]
    first = comparisons[0]
    workload = "a step verifies requests x tokens of each, and a round has 4 times as many requests"
    explained = _explain(first, _format_losses(records[0], first))
    note = f"{first.workload.model.name}: {workload}. {explained}"
    return replace(tables[0], headings=["a step", *tables[0].headings], rows=rows, note=note, text_columns=2)


def summarize_verified(*records: Mapping[str, Any]) -> Table:
    """Return a table with one row for each record.

    A row contains the ratios and the active experts: first with drafts alone, then with drafts and each policy.
    """
    rows, names = [], []
    for points in records:
        comparison = Comparison.read(points[KEY])
        alone, *policies = [number for number, one in enumerate(comparison.series) if one.variant.args]
        keys = [comparison.series[number].variant.keys for number in policies]
        names = ["a plain budget", *(f"acceptance {one['acceptance']}" for one in keys[1:])]
        ratios = [format_spread(comparison.summaries[number].paired_ratio, 2) for number in (alone, *policies)]
        experts = [format_number(comparison.summaries[number].experts_after, 0) for number in policies]
        added = ", ".join(str(one["add"]) for one in keys)
        rows.append([_name_step(comparison), *ratios, added, f"{comparison.active[alone]:.0f} -> {', '.join(experts)}"])
    headings = ["requests x draft tokens", "drafts alone", *names, "add", "experts"]
    note = "Tokens/s divided by those without drafts and policy, mean of the rounds' ratios [95 % t-interval]. "
    note += "Experts: active experts, with drafts alone -> with the policy of each column."
    return Table("Whether drafts pay", headings, rows, note)


def _name_step(comparison: Comparison) -> str:
    """Return the size of a verify step, as "requests x draft tokens per request"."""
    flags = next(one.variant.args for one in comparison.series if one.variant.args)
    return f"{comparison.workload.concurrency} x {flags[flags.index('--speculative-num-draft-tokens') + 1]}"


def _find_losses(points: Mapping[str, Any], comparison: Comparison) -> list[Loss | None]:
    """Return the additional loss of each row, or None if the loss was not measured.

    A row with drafts is compared with the first row with drafts. A row without drafts is compared with the first row
    without drafts.
    """
    first: dict[bool, Any] = {}
    losses: list[Loss | None] = []
    for one in comparison.series:
        point = points.get(quality_key(one.variant.name))
        reference = first.setdefault(bool(one.variant.args), point) if point else None
        losses.append(compare_nats(point, reference, comparison.workload.concurrency) if point and reference else None)
    return losses


def _format_losses(points: Mapping[str, Any], comparison: Comparison) -> list[str]:
    """Format the loss of each row.

    The first row with drafts and the first row without drafts show the loss itself. Other rows show the difference.
    """
    seen: set[bool] = set()
    cells = []
    for one, loss in zip(comparison.series, _find_losses(points, comparison), strict=True):
        is_first = loss is not None and bool(one.variant.args) not in seen
        seen |= {bool(one.variant.args)} if is_first else set()
        cells.append("-" if loss is None else f"{loss.cross_entropy:.3f}" if is_first else loss.format(3))
    return cells


ESTIMATED = """\
Measured: time per output token (TPOT) over the first row's in the same round, mean [95 % t-interval], of the widened
model. Estimated: the share of a step's bytes that is still read, without check's 34 and 40 us a layer, because launches
cost a CPU next to nothing. Negative: the estimate promises more than was measured."""


def tabulate_estimate(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each policy that was measured without drafts and selected experts."""
    comparison, weights = Comparison.read(points[KEY]), read_widened()
    rows = []
    for number in comparison.order[1:]:
        row = comparison.summaries[number]
        if comparison.series[number].variant.args or row.experts_before is None or row.experts_after is None:
            continue
        measured = spread(_pair_tpot(comparison.series[number], comparison.series[0]))
        estimated = _divide_bytes(weights, row.experts_before, row.experts_after)
        off = f"{estimated / measured.mean - 1:+.0%}"
        rows.append([row.name, format_experts(row), format_spread(measured, 2), f"{estimated:.2f}", off])
    headings = ["policy", "active experts", "measured", "estimated", "off"]
    return Table("Estimated and measured time a step", headings, rows, ESTIMATED)


def _divide_bytes(weights: Weights, before: float, after: float) -> float:
    """Return the share of the weights that a step still reads if the active experts decrease to `after`."""
    read = [weights.dense + weights.moe_layers * active * weights.expert for active in (after, before)]
    return read[0] / read[1]


def _pair_tpot(policy: Series, vanilla: Series) -> list[float]:
    """Return the policy's TPOT divided by the TPOT of vanilla, for each round."""
    pairs = zip(policy.results, vanilla.results, strict=True)
    return [one["median_tpot_ms"] / base["median_tpot_ms"] for one, base in pairs]
