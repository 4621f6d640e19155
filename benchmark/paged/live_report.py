"""A record of served paged experts on paper."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch

from benchmark.common.comparison import ONE_ROUND, Comparison, format_number, format_spread
from benchmark.common.rounds import Series
from benchmark.common.table import Table
from benchmark.paged.settings import shorten
from benchmark.quality.measure import compare_loss

VANILLA, OBSERVED = "vanilla, paged", "observe, paged"
NOTE = """\
At a time: requests. Medians over the rounds [lower, upper quartile]; ratio: of output tokens/s to paged vanilla's,
within each round. Page-ins: a layer and step; of a policy what the model's own routing would have paged in from the
same state -> its own. Loss: nats a token of held-out text, the domains mixed, forced through the server's own decode
steps, and what a policy adds to vanilla's, ± the standard error; sums right: share of arithmetic problems."""
Points = Mapping[str, Any]


def key_of(concurrency: int) -> str:
    """The key of the rounds in the record."""
    return f"comparison/{concurrency}"


def quality_key(concurrency: int, name: str) -> str:
    """The key of a row's loss and sums."""
    return f"quality/{concurrency}/{name}"


def tabulate_live(points: Points) -> Table:
    """A row a number of requests and server."""
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
                    _loss(quality, vanilla),
                    format_number(quality["sums"], 3) if quality else "-",
                ]
            )
    headings = ["at a time", "server", "tokens/s", "ratio", "page-ins", "loss, nats", "sums right"]
    workload = comparisons[0].workload
    sizes = f"{workload.requests} requests, {workload.output_tokens} tokens out, {workload.rounds} rounds"
    note = f"{workload.model.name}: {sizes}. {NOTE}"
    if workload.rounds == 1:
        note = f"{note} {ONE_ROUND}"
    return Table("Paged experts, served", headings, rows, note, text_columns=2)


def _page_ins(series: Series) -> str:
    """Of all rounds."""
    counted = [one for one in series.evidence if one.page_ins is not None]
    if not counted:
        return "-"
    own, before = (fmean(getattr(one, name) for one in counted) for name in ("page_ins", "page_ins_before"))
    return f"{before:.1f} -> {own:.1f}"


def _loss(quality: Mapping[str, Any] | None, vanilla: Mapping[str, Any]) -> str:
    if quality is None:
        return "-"
    nats, reference = (torch.tensor(one["nats"])[:, None] for one in (quality, vanilla))
    loss = compare_loss(nats, reference)
    return f"{loss.cross_entropy:.3f}" if quality is vanilla else f"{loss.delta:+.3f} ± {loss.error:.3f}"
