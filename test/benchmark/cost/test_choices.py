"""The table of choices: every figure is that of a record, and of the right point of it."""

import json
from statistics import mean

import pytest

from benchmark.common.paths import RESULTS
from benchmark.cost.choices import FILLED, SELECTION, WHOLE, tabulate_choices
from benchmark.serving.report import quality_key, tabulate_serving

ROWS = ("serving/serving", "affinity/affinity")


def make_served(policy, method, active, nats):
    return {"traffic": "mixed", "policy": policy, "method": method, "active": active, "rows": 15.0, "nats": nats}


def make_ranks(fullest, nats):
    totals = {"layer_steps": 10, "fullest_rank_experts_before": 150, "fullest_rank_experts_after": fullest}
    return {"shape": {"batch": 1}, "totals": totals, "nats": nats}


@pytest.fixture
def rows():
    recorded = [json.loads((RESULTS / f"{name}.json").read_text())["points"] for name in ROWS]
    served = [
        make_served("observe", "round_robin", 50.0, []),
        make_served("observe", "total_requests", 51.0, []),
        make_served("observe", "expert_affinity", 45.0, []),
        make_served("vanilla", "expert_affinity", 43.0, [2.0, 2.0]),
        make_served("vanilla", "round_robin", 50.0, [2.0, 2.0]),
        make_served("xshare", "round_robin", 30.0, [2.02, 2.02]),
        make_served("xshare", "total_requests", 30.0, [2.5, 2.5]),
        make_served("xshare", "expert_affinity", 25.0, [2.01, 2.01]),
        make_served("vanilla", "round_robin", 1.0, [9.0]) | {"traffic": "flood"},
    ]
    nothing = make_ranks(0, [2.0, 2.0])
    nothing["totals"] = dict.fromkeys(nothing["totals"], 0)
    ranks = {
        "vanilla": nothing,
        SELECTION: make_ranks(120, [2.0, 2.0]),
        WHOLE: make_ranks(75, [2.05, 2.05]),
        FILLED: make_ranks(90, [2.01, 2.01]),
    }
    layers = {
        f"2 ranks, {where}": {"seconds": {"shard": 1.0, "ep": whole}}
        for where, whole in (("spread", 0.8), ("on the first ranks", 2.0))
    }
    table = tabulate_choices(*recorded, {str(number): point for number, point in enumerate(served)}, ranks, layers)
    return {row[0]: row[2:] for row in table.rows}


def test_figures_are_the_records(rows):
    points = json.loads((RESULTS / "serving/serving.json").read_text())["points"]
    (row,) = [row for row in tabulate_serving(points).rows if row[0] == SELECTION]
    before, after = row[3].split(" -> ")
    lost = [mean(points[quality_key(name)]["nats"]) for name in (SELECTION, "off")]
    waits, speed, loss = rows[f"selection, {SELECTION}"]
    assert waits == f"{float(after) / float(before):.2f} of the experts"
    assert speed == row[1]
    assert loss.startswith(f"{lost[0] - lost[1]:+.4f} ± ")
    assert float(loss.rpartition(" ")[2]) == pytest.approx(float(row[5].rpartition(" ")[2]), abs=0.001)
    assert rows["4 replicas, affinity, served"] == ["0.86 of the experts a token", "-", "0"]
    assert rows["4 replicas, round robin, xshare"] == ["0.60 of the experts a token", "-", "+0.0200 ± 0.0000"]
    assert rows["4 replicas, affinity, xshare"] == ["0.50 of the experts a token", "-", "+0.0100 ± 0.0000"]
    assert rows[f"4 expert-parallel ranks, {WHOLE}"] == ["0.50 of the fullest rank's", "-", "+0.0500 ± 0.0000"]
    assert rows[f"4 expert-parallel ranks, {FILLED}"] == ["0.60 of the fullest rank's", "-", "+0.0100 ± 0.0000"]
    assert rows["2 ranks, slices, active experts spread"] == ["1.25 of whole experts' time", "-", "0"]
    assert rows["2 ranks, slices, active experts on the first ranks"] == ["0.50 of whole experts' time", "-", "0"]
    assert len(rows) == 10
