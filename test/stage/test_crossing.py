"""Where two features meet: exact rows and kept calls, depth and graphs, paging and layers, vanilla and graphs."""

import pytest
import torch

from sglang_xshare import Router, hooks, select
from sglang_xshare.policies import VANILLA
from sglang_xshare.stage.step import StepKey
from sglang_xshare.upstream.batches import Batches
from stage.fake import TOP_K, XSHARE, allows_graph, flags, forward, forward_batch
from stage.paged_model import REPORTER, PagedModel, make_schedule, put
from stage.switching import Capturing, note_selections, switch
from stage.test_exact import Req, arrive, batch_of


def test_a_kept_call_of_few_columns_is_not_that_of_a_step_with_exact_rows(build):
    """`kmax` below top-k: rows of an exact request take more columns than the call without them has room for."""
    model, _ = build(1, **flags("oea", k0=1, kmax=2))
    for asked in (None, "exact", "exact", None):
        reqs = arrive(*(Req(f"{asked} {number}", asked if number == 2 else None) for number in range(4)))
        forward(model, batch_of(reqs))
        weights, ids = model.routed[0]
        assert ids.shape == (4, TOP_K if asked else 2)
        vanilla = select(model.logits, VANILLA, Router(TOP_K))
        if asked:
            assert torch.equal(ids[2], vanilla.topk_ids[2])
            assert torch.equal(weights[2], vanilla.topk_weights[2])
        del reqs


def test_a_verify_graph_captured_anew_under_vanilla_still_reads_how_deep_drafts_are(build, reporter, monkeypatch):
    """As in a weight update: vanilla's numbers are in its buffer, and the next switch writes others."""
    verifies = flags("xshare", k0=1, add=1, acceptance=0.5)
    model, installed = build(1, Batches((8,)), **verifies, speculative_algorithm="EAGLE3")
    capturing, launched = Capturing(monkeypatch, model, installed), note_selections(monkeypatch)

    def verify(model, rows):
        batch = forward_batch("verify", rows, batch_size=2)
        batch.positions = torch.arange(4).repeat(2)
        forward(model, batch, alone=True)

    for _ in range(2):
        launched.clear()
        capturing.capture(8, verify)
        assert launched[-1].batch.depth.tolist() == [0, 1, 2, 3] * 2
        switch(installed, None, reporter)
        assert not installed.graphs.stale


def test_a_graph_is_replayed_only_if_every_layer_fits_its_slots(monkeypatch):
    stage = put(monkeypatch, PagedModel(), k0=1, add=2)
    assert allows_graph(8)
    assert stage.in_force.fits(StepKey("decode", 8))
    switch(stage, make_schedule("xshare", k0=1, add=2, layers={"1": {"policy": "vanilla"}}), REPORTER)
    assert not allows_graph(8)
    assert not stage.in_force.fits(StepKey("decode", 8)), "the sizes of a capture"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_layer_whose_config_sglang_replaces_stops_the_next_capture(build, monkeypatch, is_first):
    """Every capture runs the stage's check, so that no graph is made in which a layer does not select."""
    model, installed = build(2, Batches((8,)), **XSHARE)
    capture = Capturing(monkeypatch, model, installed)
    if not is_first:
        capture()
    carrying = model.configs[1]
    model.configs[1] = carrying.__class__(top_k=carrying.top_k)
    assert hooks.route(model.configs[1], model.logits) is model.configs[1]
    with pytest.raises(RuntimeError, match=r"^MoE layers \[1\] did not route through the expert policy in a decode"):
        capture()
