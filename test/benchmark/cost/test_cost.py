"""The cost of selection: its share of a decode step, and a small real run in which every policy routes."""

import pytest
from common.made_up import make_point, make_series

from benchmark.common.variant import parse_variant
from benchmark.cost.ranks import read_seconds
from benchmark.cost.report import ROUTING, STEP, added_share

POINTS = {
    STEP: make_point([make_series("vanilla", [20.0])]),
    ROUTING: {"seconds": {"vanilla": 4e-4, "xshare": 9e-4}, "rows": 16, "layers": 4, "model": "m"},
}


def test_the_stages_cost_is_what_it_adds_to_vanilla():
    assert added_share(POINTS, "xshare") == pytest.approx(0.01)


def test_routing_really_runs_under_the_stage():
    from benchmark.cost.routers import DecodeShape, Routers, time_routing
    from sglang_xshare import hooks

    shape = DecodeShape(rows=4, layers=2, experts=16, top_k=4)
    policy = Routers(shape, parse_variant("xshare:k0=1,add=4"))
    assert policy.time_step() > 0
    assert policy.stage.acting.counters.totals.sum() > 0
    assert hooks._stage is None
    assert Routers(shape, parse_variant("vanilla")).stage is None
    variants = [parse_variant(text) for text in ("vanilla", "oea:k0=2")]
    times = time_routing(variants, shape, rounds=3)
    assert [len(spent) for spent in times] == [3, 3]
    assert min(map(min, times)) > 0


def test_the_fastest_round_of_ranks_counts():
    assert read_seconds({"layouts": {"ep": {"layer_ms": [3.0, 2.0]}}}) == {"ep": 0.002}
    assert read_seconds({"seconds": {"ep": 0.5}}) == {"ep": 0.5}  # a record of 2026-11-27 or before
