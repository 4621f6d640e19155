"""Padding rows make no expert active, under a policy and where masking them is all that is asked for."""

import torch

from sglang_xshare.upstream.batches import Batches
from stage.fake import TOP_K, XSHARE, Model, run


def test_padding_is_masked_where_graphs_pad(attach):
    assert attach(Model(), device="meta", **XSHARE).mask_padding
    assert attach(Model(), mask_padding_experts=True).mask_padding
    assert not attach(Model(), **XSHARE).mask_padding, "a CPU server runs without graphs"


def test_padding_rows_make_no_expert_active(attach):
    model = Model(1)
    installed = attach(model, **XSHARE)
    installed.mask_padding = True
    run(model, "decode", 8, padding=5)
    weights, ids = model.routed[0]
    live = set(ids[:3].flatten().tolist())
    assert set(ids.flatten().tolist()) == live
    assert weights[3:].eq(0).all()
    assert installed.counters.totals[0, [2, 4]].tolist() == [len(live), 3]


def test_masking_alone_keeps_every_rows_own_experts(attach):
    model = Model(1)
    attach(model, Batches(always_pad=True), mask_padding_experts=True)
    run(model, "decode", 8, padding=5)
    weights, ids = model.routed[0]
    top = model.logits.softmax(-1).topk(TOP_K)
    assert ids[:3].tolist() == top.indices[:3].tolist()
    torch.testing.assert_close(weights[:3], top.values[:3] / top.values[:3].sum(-1, keepdim=True))
    assert weights[3:].eq(0).all()
    assert set(ids.flatten().tolist()) == set(ids[:3].flatten().tolist())


def test_masking_alone_leaves_steps_of_sizes_without_padding_to_the_model(attach):
    model = Model(1)
    attach(model, Batches(captured=(1, 2, 4, 8)), mask_padding_experts=True)
    for rows, selects in ((2, False), (4, True), (8, True), (9, False)):
        run(model, "decode", rows)
        assert (model.routed[0] is not None) == selects, rows
