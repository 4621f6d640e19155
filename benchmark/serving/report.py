"""The tables of a record of served policies: what each gains beside what it costs, and how far `check` is off."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmark.common.comparison import NO_STEP, ONE_ROUND, Comparison, format_experts, format_number, format_spread
from benchmark.common.rounds import Series
from benchmark.common.speculative import DRAFTING
from benchmark.common.table import Table
from benchmark.common.widened import read_widened
from benchmark.quality.measure import compare_nats
from sglang_xshare.check.weights import Weights

SUMMARY = ("off", "xshare", f"{DRAFTING}xshare")
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
    note = f"{comparison.workload.model.name}: {comparison.workload}. {_explain(comparison, losses)}"
    shown = [[row[column] for column in kept] for row in rows]
    return Table("Policies served side by side", [headings[column] for column in kept], shown, note)


def _explain(comparison: Comparison, losses: Sequence[str]) -> str:
    """What the cells of these rows mean."""
    parts = (
        NOTE,
        QUALITY if set(losses) != {"-"} else "",
        DRAFTS if any(one.variant.args for one in comparison.series) else "",
        f"{NO_STEP}: {', '.join(comparison.idle)}." if comparison.idle else "",
        ONE_ROUND if comparison.rounds == 1 else "",
    )
    return " ".join(filter(None, parts))


def summarize_serving(points: Mapping[str, Any], verified: Mapping[str, Any] | None = None) -> Table:
    """Of that table the baseline, default policy, drafts with it and alone; of one request the best `verified`."""
    table = tabulate_serving(points)
    rows = {row[0]: row for row in table.rows}
    shown = [rows[name] for name in SUMMARY]
    note = f"{table.note} Without a policy EAGLE-3 has the ratio {rows[f'{DRAFTING}off'][1]}."
    if verified is not None:
        _, *drafting = tabulate_serving(verified).rows
        alone = next(row for row in drafting if row[0] == f"{DRAFTING}off")
        best = next(row for row in drafting if row is not alone)
        tokens = _count_verified(Comparison.read(verified[KEY]))
        shown.append([f"one request, {tokens} tokens verified: {best[0]}", *best[1:]])
        note += f" Last row: against one request without drafts; EAGLE-3 alone has {alone[1]} there."
    return replace(table, rows=shown, note=note)


def tabulate_verified(*records: Mapping[str, Any]) -> Table:
    """Those tables one below the other, for each what a verify step has."""
    tables = [tabulate_serving(points) for points in records]
    comparisons = [Comparison.read(points[KEY]) for points in records]
    rows = [[_name_step(one), *row] for one, table in zip(comparisons, tables, strict=True) for row in table.rows]
    first = comparisons[0]
    workload = "a step verifies so many requests x tokens of each, a round 4 times as many requests"
    explained = _explain(first, _format_losses(records[0], first.series))
    note = f"{first.workload.model.name}: {workload}. {explained}"
    return replace(tables[0], headings=["a step", *tables[0].headings], rows=rows, note=note, text_columns=2)


def summarize_verified(*records: Mapping[str, Any]) -> Table:
    """A row a record: of drafts alone, and with each policy in the order served, the ratio and the active experts."""
    rows, names = [], []
    for points in records:
        comparison = Comparison.read(points[KEY])
        alone, *policies = [number for number, one in enumerate(comparison.series) if one.variant.args]
        keys = [comparison.series[number].variant.keys for number in policies]
        names = ["a plain budget", *(f"acceptance {one['acceptance']}" for one in keys[1:])]
        ratios = [format_number(comparison.summaries[number].paired_ratio.median, 2) for number in (alone, *policies)]
        experts = [format_number(comparison.summaries[number].experts_after, 0) for number in policies]
        rows.append([_name_step(comparison), *ratios, f"{comparison.active[alone]:.0f} -> {', '.join(experts)}"])
    headings = ["requests x tokens", "drafts alone", *names, "experts"]
    note = "Tokens/s against no drafts and no policy, median. Experts: active ones, of drafts alone -> of each."
    return Table("Whether drafts pay", headings, rows, note)


def _name_step(comparison: Comparison) -> str:
    """Requests x tokens of each in a verify step."""
    return f"{comparison.workload.concurrency} x {_count_verified(comparison)}"


def _count_verified(comparison: Comparison) -> str:
    """Tokens of a request in a verify step."""
    flags = next(one.variant.args for one in comparison.series if one.variant.args)
    return flags[flags.index("--speculative-num-draft-tokens") + 1]


def _format_losses(points: Mapping[str, Any], series: Sequence[Series]) -> list[str]:
    """Of each row: of the first one with drafts and the first one without the loss, of the others what they add."""
    first: dict[bool, Any] = {}
    cells = []
    for one in series:
        point = points.get(quality_key(one.variant.name))
        if point is None:
            cells.append("-")
            continue
        reference = first.setdefault(bool(one.variant.args), point)
        loss = compare_nats(point, reference)
        cells.append(f"{loss.cross_entropy:.3f}" if reference is point else f"{loss.delta:+.3f} ± {loss.error:.3f}")
    return cells


ESTIMATED = """\
Measured: TPOT over vanilla's within a round, median, of the widened model. Estimated: the share of a
step's bytes still read. A CPU has no launch cost worth naming, so that the 34 and 40 us a layer are left out.
Negative means that the estimate promises more than was measured."""


def tabulate_estimate(points: Mapping[str, Any]) -> Table:
    """A row a policy that selected in some step of one token a request."""
    comparison, weights = Comparison.read(points[KEY]), read_widened()
    rows = []
    for number in comparison.order[1:]:
        row = comparison.summaries[number]
        if comparison.series[number].variant.args or row.experts_before is None or row.experts_after is None:
            continue
        measured = _paired_tpot(comparison.series[number], comparison.series[0])
        estimated = _ratio_of_bytes(weights, row.experts_before, row.experts_after)
        off = f"{estimated / measured - 1:+.0%}"
        rows.append([row.name, format_experts(row), f"{measured:.2f}", f"{estimated:.2f}", off])
    headings = ["policy", "active experts", "measured", "estimated", "off"]
    return Table("Estimated and measured time a step", headings, rows, ESTIMATED)


def _ratio_of_bytes(weights: Weights, before: float, after: float) -> float:
    """The share of a step's weights still read with `after` of `before` experts: its time, were bandwidth all."""
    read = [weights.dense + weights.moe_layers * active * weights.expert for active in (after, before)]
    return read[0] / read[1]


def _paired_tpot(policy: Series, vanilla: Series) -> float:
    """The median over the rounds of one's TPOT over the other's."""
    pairs = zip(policy.results, vanilla.results, strict=True)
    return median(one["median_tpot_ms"] / base["median_tpot_ms"] for one, base in pairs)
