"""How far `sglang-xshare estimate` is off on the served policies: its premise, that time goes with the bytes read."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmark.common.comparison import Comparison, format_experts
from benchmark.common.large_model import configuration
from benchmark.common.paths import TRAINED
from benchmark.common.rounds import Series
from benchmark.common.table import Table
from benchmark.serving.report import KEY
from sglang_xshare.estimate.latency import ratio_of_bytes
from sglang_xshare.estimate.weights import Weights, read_weights

NOTE = """\
Measured: TPOT over vanilla's within a round, median, of the generated model of 128 experts. Estimated: the share of a
step's bytes still read. A CPU has no launch cost worth naming, so that the 34 us a layer are left out. Negative means
that the estimate promises more than was measured."""


def tabulate_estimate(points: Mapping[str, Any]) -> Table:
    """A row a policy that selected in some step."""
    comparison, weights = Comparison.read(points[KEY]), _read_generated()
    rows = []
    for number in comparison.order[1:]:
        row = comparison.summaries[number]
        if row.experts_before is None or row.experts_after is None:
            continue
        measured = _paired_tpot(comparison.series[number], comparison.series[0])
        estimated = ratio_of_bytes(weights, row.experts_before, row.experts_after)
        off = f"{estimated / measured - 1:+.0%}"
        rows.append([row.name, format_experts(row), f"{measured:.2f}", f"{estimated:.2f}", off])
    headings = ["policy", "active experts", "measured", "estimated", "off"]
    return Table("Estimated and measured time a step", headings, rows, NOTE)


def _paired_tpot(policy: Series, vanilla: Series) -> float:
    """The median over the rounds of one's TPOT over the other's."""
    pairs = zip(policy.results, vanilla.results, strict=True)
    return median(one["median_tpot_ms"] / base["median_tpot_ms"] for one, base in pairs)


def _read_generated() -> Weights:
    """Of the generated model, which need not have been generated."""
    vocab_size = json.loads((TRAINED / "config.json").read_text())["vocab_size"]
    config = configuration(vocab_size).to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return read_weights(Path(folder))
