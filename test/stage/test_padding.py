"""Padding rows make no expert active, under a policy and where masking them is all that is asked for."""

import pytest
import torch

from sglang_xshare import Router, build_plan, hooks, select
from sglang_xshare.stage.layer import DROPPED, FILLED
from sglang_xshare.stage.step import Step
from sglang_xshare.types import Batch
from sglang_xshare.upstream.batches import Batches
from stage.fake import EXPERTS, TOP_K, XSHARE, Gather, gathered_batches, outcomes, put_in_step, run


def test_padding_is_masked_where_graphs_pad(build):
    """A CPU server runs without graphs."""
    asked = ({"device": "meta", **XSHARE}, {"mask_padding_experts": True}, XSHARE)
    assert [build(**flags)[1].reads_padding for flags in asked] == [True, True, False]


def test_padding_rows_make_no_expert_active(build):
    """Each step of a size has its own."""
    model, installed = build(1, **XSHARE)
    installed.reads_padding = True
    counted = torch.zeros(2)
    for padding in (5, 2, 0, 7):
        run(model, "decode", 8, padding=padding)
        weights, ids = model.routed[0]
        live = set(ids[: 8 - padding].flatten().tolist())
        assert set(ids.flatten().tolist()) == live
        assert weights.eq(0).all(1).tolist() == [False] * (8 - padding) + [True] * padding
        counted += torch.tensor([len(live), 8 - padding])
    assert installed.acting.counters.totals[0, [2, 4]].tolist() == counted.tolist()


def test_every_attention_dp_rank_selects_alike(build, monkeypatch):
    """The router sees the rows of all ranks on each; the mask tells padding from them, on a CPU too."""
    model, installed = build(1, **XSHARE)
    assert not installed.reads_padding
    batches = gathered_batches("decode", [3, 1, 0])
    monkeypatch.setattr("sglang_xshare.stage.step.gather_rows", Gather(batches))
    model.logits = torch.randn(9, EXPERTS, generator=torch.Generator().manual_seed(9))
    live = torch.tensor([True, True, True, True, False, False, False, False, False])
    wanted = select(model.logits[live], build_plan("xshare", k0=1, add=2), Router(TOP_K)).active
    for batch in batches:
        model.runner.forward(batch)
        weights, ids = model.routed[0]
        assert set(ids.flatten().tolist()) == set(wanted.nonzero().flatten().tolist())
        assert weights[~live].eq(0).all()
    assert outcomes(installed) == {"policy": 3}
    assert installed.acting.counters.totals[0, [0, 2, 4]].tolist() == [3, 3 * wanted.sum(), 3 * 4]


def test_masking_alone_keeps_every_rows_own_experts(build):
    model, _ = build(1, Batches(always_pad=True), mask_padding_experts=True)
    run(model, "decode", 8, padding=5)
    weights, ids = model.routed[0]
    top = model.logits.softmax(-1).topk(TOP_K)
    assert ids[:3].tolist() == top.indices[:3].tolist()
    torch.testing.assert_close(weights[:3], top.values[:3] / top.values[:3].sum(-1, keepdim=True))
    assert weights[3:].eq(0).all()
    assert set(ids.flatten().tolist()) == set(ids[:3].flatten().tolist())


def test_masking_alone_leaves_steps_of_sizes_without_padding_to_the_model(build):
    model, _ = build(1, Batches(captured=(1, 2, 4, 8)), mask_padding_experts=True)
    for rows, selects in ((2, False), (4, True), (8, True), (9, False)):
        run(model, "decode", rows)
        assert (model.routed[0] is not None) == selects, rows


@pytest.mark.parametrize("written", [-1, 0], ids=["CUDA", "elsewhere"])
@pytest.mark.parametrize("convention", [FILLED, DROPPED])
@pytest.mark.parametrize("live", [0, 1, 3])
def test_padding_rows_that_upstream_has_overwritten_make_no_expert_active(build, convention, written, live):
    """`TopK` with `num_token_non_padded`: SGLang writes -1 to the rows behind, or 0 with weight 0, whatever they hold.
    A fused shared expert's column keeps its weight on CUDA.
    """
    model, installed = build(1, **XSHARE)
    installed.reads_padding = True
    (layer,) = installed.layers
    layer.convention = convention
    run(model, "decode", 8, padding=8 - live)
    weights, ids = model.routed[0]
    put_in_step(layer, None, Step("decode", 8, Batch()))
    shared = torch.full((8, 1), 32, dtype=ids.dtype)
    weights, ids = torch.cat([weights, torch.full((8, 1), 0.4)], 1), torch.cat([ids, shared], 1)
    ids[live:] = written
    if written == 0:
        weights[live:] = 0
    given = ids.clone()
    found = hooks.finish(layer.selecting_config, ids, weights, torch.tensor(live))
    used = {
        expert for row, kept in zip(given[:live], weights[:live], strict=True) for expert in row[kept != 0].tolist()
    }
    if convention == DROPPED:
        assert set(found.flatten().tolist()) <= used | {-1}
        assert (found[live:] == -1).all() or written == -1
    else:
        assert set(found.flatten().tolist()) <= (used or {0})
    for row, kept, before in zip(found[:live], weights[:live], given[:live], strict=True):
        assert row[kept != 0].tolist() == before[kept != 0].tolist()
    assert hooks.finish(layer.plain_config, given, weights, torch.tensor(live)) is given, "the layer does not select"
    assert hooks.finish(layer.selecting_config, given, weights) is given, (
        "where upstream leaves padding alone nothing is done"
    )
