"""How far the estimate of `sglang-xshare check` is off on the served policies: its premise is that time goes with the
bytes read.
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmark.common.comparison import Comparison, format_experts
from benchmark.common.rounds import Series
from benchmark.common.table import Table
from benchmark.common.widened import read_widened
from benchmark.serving.report import KEY
from sglang_xshare.check.weights import Weights

NOTE = """\
Measured: TPOT over vanilla's within a round, median, of the widened model. Estimated: the share of a
step's bytes still read. A CPU has no launch cost worth naming, so that the 34 us a layer are left out. Negative means
that the estimate promises more than was measured."""


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
    return Table("Estimated and measured time a step", headings, rows, NOTE)


def _ratio_of_bytes(weights: Weights, before: float, after: float) -> float:
    """The share of a step's weights that are still read with `after` active experts of `before`: what the step's time
    would be in proportion, were bandwidth all.
    """
    read = [weights.dense + weights.moe_layers * active * weights.expert for active in (after, before)]
    return read[0] / read[1]


def _paired_tpot(policy: Series, vanilla: Series) -> float:
    """The median over the rounds of one's TPOT over the other's."""
    pairs = zip(policy.results, vanilla.results, strict=True)
    return median(one["median_tpot_ms"] / base["median_tpot_ms"] for one, base in pairs)
