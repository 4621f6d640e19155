"""What experiment `layer` feeds the layer: logits as real batches have them, and exactly as many experts as it says."""

from unittest.mock import Mock

import pytest
import torch
from gpu.recorded import write_record

from benchmark.gpu import moe_layer, timing
from benchmark.gpu.layer import ROWS, SHAPES, measure
from benchmark.gpu.moe_layer import Shape, draw_logits, make_topk_config, model_router, route_to, sorted_slots
from sglang_xshare import Batch, Router, build_plan, hooks, select
from sglang_xshare.types import Alignment

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


def test_the_runner_takes_what_the_policy_sorted():
    """As in a server with --expert-policy-align; test/stage/test_alignment.py has upstream's own runner take it."""
    shape = Shape("small", hidden=16, width=16, experts=32, top_k=4, layers=1)
    logits = draw_logits(shape, ROWS, "cpu").float()
    sort = Mock(return_value="upstream's")
    with sorted_slots() as aligner:
        config = make_topk_config(shape, build_plan("oea", k0=1), ROWS, "cpu", aligner)
        routed = model_router(logits, config)(0, torch.zeros(ROWS, 16))
        assert hooks.align(sort, False)(routed.topk_ids, 16, 32) == "upstream's"
        assert aligner.slots(ROWS).block_size == 16
        aligner.offer(routed.topk_ids, 32, Alignment(*torch.zeros(3, 1), 16))
        assert len(hooks.align(sort, False)(routed.topk_ids, 16, 32)) == 3
    assert aligner.served == sort.call_count == 1
    assert hooks.align(sort, False) is sort


@pytest.fixture
def active(monkeypatch):
    """Layers that take no GPU; the numbers of active experts that they have been routed to."""
    active, logits = [], moe_layer.draw_logits
    monkeypatch.setattr(moe_layer, "MoeLayers", Mock())
    monkeypatch.setattr(moe_layer, "draw_logits", lambda shape, rows, device: logits(shape, rows, "cpu"))
    monkeypatch.setattr(moe_layer, "route_to", lambda number, *_: active.append(number))
    monkeypatch.setattr(moe_layer, "fixed_router", Mock())
    monkeypatch.setattr(moe_layer, "make_topk_config", Mock())
    monkeypatch.setattr(timing, "time_graph", lambda run: 8 * (34.0 + 2.0 * active[-1]))
    monkeypatch.setattr("benchmark.gpu.layer._time_sorted", lambda *_: (40.0, True))
    return active


def test_a_policy_with_more_experts_a_token_than_the_model_is_left_out(tmp_path, active):
    record = write_record(tmp_path, "layer", {"copy": {"gb_per_s": 4000.0}})
    measure(record, ["gpt-oss-20b"])
    timed = {key.partition("/")[2] for key in record.points}
    assert {"off", "oea:k0=3", "oea:k0=3, slots sorted"} <= timed
    assert not any("k0=5" in key for key in timed), "of four"
