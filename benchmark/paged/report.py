"""Tables of the measurements with paged experts, and the policies that are measured."""

import json
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmark.common.comparison import ONE_ROUND, Comparison, format_number
from benchmark.common.interval import format_spread
from benchmark.common.rounds import Series
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE
from benchmark.quality.measure import compare_nats, explain_errors, format_loss
from sglang_xshare.policies.spelling import spell_policy

NOTE = """\
Page-ins a layer and step, in brackets relative to vanilla, and the loss in nats a token above vanilla on the same
tokens."""
Points = Mapping[str, Mapping[str, Any]]


def tabulate_paged(points: Points) -> Table:
    """Return a table with one row for each number of slots and policy, and one column for each number of rows.

    Numbers of rows at which only vanilla was measured have no column.
    """
    found = {(one["slots"], one["policy"], one["rows"]): one for one in points.values()}
    sizes = sorted({one["rows"] for one in points.values() if one["policy"] != BASELINE})
    rows = []
    for slots, policy in dict.fromkeys(key[:2] for key in found):
        cells = []
        for size in sizes:
            point, vanilla = (found.get((slots, name, size)) for name in (policy, BASELINE))
            cells.append(_cell(point, vanilla) if point and vanilla else "")
        rows.append([str(slots), shorten(policy), *cells])
    headings = ["slots", "policy", *(f"{size} rows" if size > 1 else "1 row" for size in sizes)]
    note = f"{NOTE} {explain_errors(one['loss'] for one in points.values())} {EXPLAINED}"
    return Table("Page-ins and loss with paged experts", headings, rows, note, text_columns=2)


def _cell(point: Mapping[str, Any], vanilla: Mapping[str, Any]) -> str:
    page_ins, whole = point["page_ins"], vanilla["page_ins"]
    if point["policy"] == BASELINE or not whole:
        return f"{page_ins:.1f}"
    return f"{page_ins:.1f} ({page_ins / whole:.2f}) at {format_loss(point['loss'])}"


VANILLA, OBSERVED = "vanilla, paged", "observe, paged"
LIVE_NOTE = """\
At a time: requests. Tokens/s: mean of the rounds [95 % t-interval]. Ratio: output tokens/s relative to paged vanilla
within each round. Page-ins: a layer and step; of a policy the page-ins of the model's own routing from the same state
-> those of the policy. Loss: nats a token of held-out text of mixed domains, forced through the server's own decode
steps; of a policy the difference from vanilla, ± half its 95 % t-interval over batches. Sums right: share of arithmetic
problems with a right answer."""


def key_of(concurrency: int) -> str:
    """Return the key of the point that contains the rounds."""
    return f"comparison/{concurrency}"


def quality_key(concurrency: int, name: str) -> str:
    """Return the key of the point that contains a variant's loss and its share of solved problems."""
    return f"quality/{concurrency}/{name}"


def tabulate_live(points: Points) -> Table:
    """Return a table with one row for each number of requests and each server."""
    rows = []
    comparisons = [Comparison.read(point) for key, point in points.items() if key.startswith("comparison/")]
    for one in comparisons:
        concurrency = one.workload.concurrency
        vanilla: Mapping[str, Any] = points[quality_key(concurrency, OBSERVED)]
        for series, summary in zip(one.series, one.summaries, strict=True):
            name = series.variant.name
            quality: Mapping[str, Any] | None = points.get(quality_key(concurrency, name))
            if name == VANILLA:
                quality = vanilla
            rows.append(
                [
                    str(concurrency),
                    shorten(name),
                    format_spread(summary.throughput, 0),
                    format_spread(summary.paired_ratio, 2),
                    format_number(vanilla["page_ins"], 1) if name == VANILLA else _page_ins(series),
                    _loss(quality, vanilla, concurrency),
                    format_number(quality["sums"], 3) if quality else "-",
                ]
            )
    headings = ["at a time", "server", "tokens/s", "ratio", "page-ins", "loss, nats", "sums right"]
    workload = comparisons[0].workload
    sizes = f"{workload.requests} requests, {workload.output_tokens} tokens out, {workload.rounds} rounds"
    note = f"{workload.model.name}: {sizes}. {LIVE_NOTE} {EXPLAINED}"
    if workload.rounds == 1:
        note = f"{note} {ONE_ROUND}"
    return Table("Paged experts, served", headings, rows, note, text_columns=2)


def _page_ins(series: Series) -> str:
    """Format the mean page-ins as "model's own routing -> policy"."""
    counted = [one for one in series.evidence if one.page_ins is not None]
    if not counted:
        return "-"
    own, before = (fmean(getattr(one, name) for one in counted) for name in ("page_ins", "page_ins_before"))
    return f"{before:.1f} -> {own:.1f}"


def _loss(quality: Mapping[str, Any] | None, vanilla: Mapping[str, Any], concurrency: int) -> str:
    if quality is None:
        return "-"
    loss = compare_nats(quality, vanilla, concurrency)
    return f"{loss.cross_entropy:.3f}" if quality is vanilla else loss.format(3)


WEIGHTED: dict[str, Any] = {"utility": "squared", "own_share": 0.75}
"""The keys that all policies measured by default have. They give the smallest loss for a given number of experts."""
MARK = "†"
"""The mark that stands for the keys in `WEIGHTED` in the tables."""
SPELT = ",".join(f"{key}={value}" for key, value in WEIGHTED.items())
EXPLAINED = f"{MARK}: {SPELT}."


def _spell(**keys: Any) -> str:
    return spell_policy("xshare", {"k0": 1, **keys, **WEIGHTED})


def _by_layer(*adds: int) -> str:
    first, *others = adds
    return _spell(add=first, layers={str(layer): {"add": add} for layer, add in enumerate(others, 1) if add != first})


BLIND = _spell(add=16, free_residents=False), spell_policy("custom", {"budget": 32, **WEIGHTED})
"""The policies that ignore which experts are loaded.

The second policy selects the best 32 of 64 experts, so its loss is the smallest that is possible with 32 slots.
"""
UNIFORM = tuple(_spell(add=add) for add in (4, 2, 1))
BY_LAYER = _by_layer(2, 2, 4, 8), _by_layer(1, 1, 3, 5)
"""Policies with a different budget in each layer. Selection in the last layer of the shipped checkpoint costs most."""
POLICIES = (*BLIND, *UNIFORM, _spell(add=0, mass=0.95), *BY_LAYER)


def shorten(policy: str) -> str:
    """Replace the keys in `WEIGHTED` by a mark at the end, to shorten a table. Keys are spelled plainly or in JSON."""
    short = policy.replace(f",{SPELT}", "").replace(f", {json.dumps(WEIGHTED)[1:-1]}", "")
    return policy if short == policy else short + MARK
