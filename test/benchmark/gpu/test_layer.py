"""Experiments `layer` and `levers`: logits as real batches have them, exactly as many experts as they say, and levers
that the runner took.
"""

from dataclasses import replace

import pytest
import torch

from benchmark.gpu import layer
from benchmark.gpu.layer import PREBUILT, UPSTREAM
from benchmark.gpu.levers import spell_change
from benchmark.gpu.moe_layer import ROWS, SHAPES, Shape, draw_logits, make_router, route_to
from sglang_xshare import Batch, Router, build_plan, hooks, select

QWEN3 = replace(SHAPES["qwen3-30b-a3b"], layers=48)


def test_as_many_experts_are_active_as_the_paper_counted():
    """OEA, Table 4, averages of four benchmarks."""
    logits = draw_logits(QWEN3, ROWS, "cpu")

    def mean_active(policy, **keys):
        plan = build_plan(policy, **keys)
        found = [select(one, plan, Router(top_k=8), Batch(), backend="torch").active.sum() for one in logits]
        return torch.stack(found).float().mean().item()

    found = [mean_active("vanilla"), mean_active("oea", k0=3), mean_active("oea", k0=5)]
    assert found == pytest.approx([48.8, 25.1, 35.1], abs=2)


@pytest.mark.parametrize("active", [8, 9, 24, 100, 127, 128])
def test_ids_use_exactly_the_experts_asked_for(active):
    ids = route_to(active, QWEN3, ROWS, "cpu")
    assert ids.shape == (48, ROWS, 8)
    for one in ids:
        counts = torch.bincount(one.flatten(), minlength=128)
        assert (counts > 0).sum() == active
        assert counts[counts > 0].max() - counts[counts > 0].min() <= 1
        assert all(len(set(row.tolist())) == 8 for row in one)
    assert not torch.equal(ids[0], ids[1])
    with pytest.raises(ValueError, match=r"active must be between 8 and 128 \(got 129\)"):
        route_to(129, QWEN3, ROWS, "cpu")


def test_the_policy_goes_through_upstreams_own_router_call(monkeypatch):
    monkeypatch.setattr(hooks, "_stage", None)
    shape = Shape("small", hidden=16, width=16, experts=32, top_k=4, layers=1)
    logits = draw_logits(shape, ROWS, "cpu").float()
    plan = build_plan("oea", k0=1)
    routed = make_router(shape, plan, logits)(0, torch.zeros(ROWS, 16))
    expected = select(logits[0], plan, Router(top_k=4), Batch(), backend="reference")
    kept = expected.topk_ids >= 0
    assert torch.equal(routed.topk_ids[kept], expected.topk_ids[kept])
    assert int(torch.bincount(routed.topk_ids.flatten().long(), minlength=32).count_nonzero()) == expected.active.sum()


def test_what_routing_takes_is_without_the_layer():
    """Of the records until 2026-11-27, in which each policy was a point, `test_table` has a published summary."""
    us = {"off": 180.0, "xshare": 135.0, "router of off": 64.0, "router of xshare": 67.25, layer.ONLY: 60.0}
    point = {"mode_us": {name: [time, time] for name, time in us.items()}, "active": {"off": 50.0, "xshare": 30.0}}
    rows = layer.rows({"qwen3-30b-a3b/policies": point})
    assert [row.measured for row in rows] == ["180.00 us, 50.0 experts", "25.0 % off", "off 4.00, xshare 7.25 us"]


def test_a_drift_of_the_clock_is_no_change():
    assert spell_change([10.0, 20.0, 40.0], [9.0, 19.0, 39.0]) == "-1.00 ± 0.00"
    # variance 2/3 of four: 3.182 standard errors
    assert spell_change([10.0] * 4, [8.0, 9.0, 9.0, 10.0]) == "-1.00 ± 1.30"


def test_a_lever_that_the_runner_did_not_take_is_no_figure():
    layer.check_taken(PREBUILT, {"prebuilt": 8, "upstream": 0}, 8)
    layer.check_taken(UPSTREAM, {}, 0)
    with pytest.raises(RuntimeError, match=r"prebuilt: the runner must take 8 alignments \(got 7\)"):
        layer.check_taken(PREBUILT, {"prebuilt": 7, "upstream": 1}, 8)
