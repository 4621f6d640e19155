"""A table that compares the methods of this project. Each method reduces the bytes for which a step waits."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmark.affinity.report import OBSERVE, name_rule
from benchmark.common.comparison import Comparison
from benchmark.common.interval import format_spread
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE, OFF
from benchmark.cost.ranks import FIRST, SPREAD, read_seconds
from benchmark.quality.measure import compare_nats
from benchmark.serving.report import KEY, quality_key

SELECTION = "xshare:k0=1,add=24"
WHOLE, FILLED = "xshare:k0=1,target_per_rank=5", "xshare:k0=1,target_per_rank=9,balance=fill"
ROUND_ROBIN = "round robin", "to compare with"
AFFINITY = "affinity", "as above, and some loss is tolerated"
NOTE = """\
All figures are from 2 CPU cores; none is from a GPU. A step waits for: active experts of the device or of the fullest
rank, divided by those under the model's own routing; for served replicas, the same of active experts a decoded token;
for slices, the time of an MoE layer divided by its time with whole experts (python -m benchmark.cost.ranks). Tokens/s:
divided by vanilla's, if a served step was timed. Loss: cross-entropy above the model's own routing, in nats a token. A
loss of 0 without ± means that no token can differ. The number after ± is half the 95 % t-interval over batches.
Replicas have no fixed batches, so theirs is the standard error over sequences. Slices were measured with random
weights, the first row with wider experts that compute the same, and all other rows with the trained checkpoint."""

Points = Mapping[str, Any]


def tabulate_choices(
    serving: Points, affinity: Points, affinity_live: Points, balance_live: Points, ranks: Points
) -> Table:
    """Return a table with one row for each method."""
    rows = [
        _select_alone(serving),
        _dispatch(affinity),
        *_serve_replicas(affinity_live),
        *_hold_whole(balance_live),
        *_hold_slices(ranks),
    ]
    headings = ["choice", "when", "a step waits for", "tokens/s", "loss, nats"]
    return Table("Which to choose when", headings, rows, NOTE, text_columns=2)


def _select_alone(serving: Points) -> list[str]:
    comparison = Comparison.read(serving[KEY])
    (row,) = [row for row in comparison.summaries if row.name == SELECTION]
    assert row.experts_before is not None
    assert row.experts_after is not None
    waits = f"{row.experts_after / row.experts_before:.2f} of the experts"
    policy, own = (serving[quality_key(name)] for name in (SELECTION, OFF))
    loss = compare_nats(policy, own, comparison.workload.concurrency)
    cells = [waits, format_spread(row.paired_ratio, 2), str(loss)]
    return [f"selection, {SELECTION}", "one device holds the model, and some loss is tolerated", *cells]


def _dispatch(affinity: Points) -> list[str]:
    rules = affinity["mixed 4"]["rules"]
    ratio = rules[name_rule()]["active"] / rules["round robin"]["active"]
    when = "several replicas, each of which holds the model; traffic of several kinds; no loss is tolerated"
    return ["4 replicas, affinity, simulated", when, f"{ratio:.2f} of the experts", "-", "0"]


def _serve_replicas(live: Points) -> list[list[str]]:
    """Return the rows for served replicas: affinity alone, and selection with each load balance method."""
    points = {(point["policy"], point["method"]): point for point in live.values() if point["traffic"] == "mixed"}
    own, alone = points[BASELINE, "round_robin"], points[BASELINE, "expert_affinity"]
    rows = [["4 replicas, affinity, served", "as above", _share(alone, own), "-", "0"]]
    for (policy, method), point in points.items():
        if policy not in (OBSERVE, BASELINE):
            name, when = AFFINITY if method == "expert_affinity" else ROUND_ROBIN
            loss = str(compare_nats(point, own))
            rows.append([f"4 replicas, {name}, {policy}", when, _share(point, own), "-", loss])
    return rows


def _share(point: Mapping[str, float], own: Mapping[str, float]) -> str:
    per_token, own_per_token = (one["active"] / one["rows"] for one in (point, own))
    return f"{per_token / own_per_token:.2f} of the experts a token"


def _hold_whole(live: Points) -> list[list[str]]:
    """Return the rows for expert-parallel ranks that hold whole experts, one row for each policy."""
    first, *others = live.values()
    own = sum(point["totals"]["fullest_rank_experts_before"] for point in others)
    steps = sum(point["totals"]["layer_steps"] for point in others)
    rows = []
    for policy in (SELECTION, WHOLE, FILLED):
        totals = live[policy]["totals"]
        share = totals["fullest_rank_experts_after"] / totals["layer_steps"] / (own / steps)
        loss = compare_nats(live[policy], first, first["shape"]["batch"])
        when = {
            SELECTION: "to compare with",
            WHOLE: "a model is larger than a device, and each rank has many experts",
            FILLED: "as above: equally many experts on each rank, for the least loss",
        }[policy]
        rows.append([f"4 expert-parallel ranks, {policy}", when, f"{share:.2f} of the fullest rank's", "-", str(loss)])
    return rows


def _hold_slices(ranks: Points) -> list[list[str]]:
    """Return the rows for ranks that hold a slice of every expert.

    Each row contains the time with slices divided by the time with whole experts.
    """
    whens = {
        SPREAD: "a model is larger than a device, ranks are in one node, and no loss is tolerated",
        FIRST: "as above, and the router is skewed",
    }
    rows = []
    for where, when in whens.items():
        seconds = [read_seconds(point) for key, point in ranks.items() if key.endswith(where)]
        ratio = median(one["shard"] / one["ep"] for one in seconds)
        rows.append([f"2 ranks, slices, active experts {where}", when, f"{ratio:.2f} of whole experts' time", "-", "0"])
    return rows
