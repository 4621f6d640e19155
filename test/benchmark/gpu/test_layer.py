"""What experiment `layer` feeds the layer: logits as real batches have them, and exactly as many experts as it says."""

import pytest
import torch

from benchmark.gpu.layer import ROWS, SHAPES, rows
from benchmark.gpu.moe_layer import Shape, draw_logits, make_topk_config, model_router, route_to
from sglang_xshare import Batch, Router, build_plan, select

QWEN3 = Shape("qwen3-30b-a3b", **{**SHAPES["qwen3-30b-a3b"], "layers": 48})


def test_as_many_experts_are_active_as_the_paper_counted():
    """OEA, Table 4, averages of four benchmarks."""
    logits = draw_logits(QWEN3, ROWS, "cpu")

    def mean_active(policy, **keys):
        plan = build_plan(policy, **keys)
        found = [select(one, plan, Router(top_k=8), Batch(), backend="torch").active.sum() for one in logits]
        return torch.stack(found).float().mean().item()

    assert mean_active("vanilla") == pytest.approx(48.8, abs=2)
    assert mean_active("oea", k0=3) == pytest.approx(25.1, abs=2)
    assert mean_active("oea", k0=5) == pytest.approx(35.1, abs=2)


@pytest.mark.parametrize("active", [8, 9, 24, 100, 127, 128])
def test_ids_use_exactly_the_experts_asked_for(active):
    ids = route_to(active, QWEN3, ROWS, "cpu")
    assert ids.shape == (48, ROWS, 8)
    for layer in ids:
        counts = torch.bincount(layer.flatten(), minlength=128)
        assert (counts > 0).sum() == active
        assert counts[counts > 0].max() - counts[counts > 0].min() <= 1
        assert all(len(set(row.tolist())) == 8 for row in layer)
    assert not torch.equal(ids[0], ids[1])


@pytest.mark.parametrize("active", [7, 129])
def test_impossible_numbers_of_experts_are_refused(active):
    with pytest.raises(ValueError, match=f"active = {active}:"):
        route_to(active, QWEN3, ROWS, "cpu")


def test_the_policy_goes_through_upstreams_own_router_call():
    shape = Shape("small", hidden=16, width=16, experts=32, top_k=4, layers=1)
    logits = draw_logits(shape, ROWS, "cpu").float()
    plan = build_plan("oea", k0=1)
    routed = model_router(logits, make_topk_config(shape, plan, ROWS, "cpu"))(0, torch.zeros(ROWS, 16))
    expected = select(logits[0], plan, Router(top_k=4), Batch(), backend="reference")
    kept = expected.topk_ids >= 0
    assert torch.equal(routed.topk_ids[kept], expected.topk_ids[kept])
    assert int(torch.bincount(routed.topk_ids.flatten().long(), minlength=32).count_nonzero()) == expected.active.sum()


def test_a_record_of_before_routing_was_timed_has_no_row_of_it():
    points = {f"qwen3-30b-a3b/{name}": {"active": 50.0, "us": 180.0} for name in ("off", "xshare")}
    assert not any("what routing takes" in row.what for row in rows(points))
    points["qwen3-30b-a3b/xshare"]["router_us"] = 7.25
    (row,) = (row for row in rows(points) if "what routing takes" in row.what)
    assert row.measured == "xshare 7.25 us"
