"""A step that a CUDA graph captures never waits for the device, and adds to the same counters as the step before."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from selection.launched import forgets
from sglang_xshare import Router, build_plan, select
from stage.fake import EXPERTS, TOP_K, XSHARE, Gather, RefuseHostData, flags, forward_batch, gathered_batches, run

__all__ = ["forgets"]
pytestmark = pytest.mark.usefixtures("forgets")
POLICIES: dict[str, dict[str, Any]] = {
    "xshare": {"k0": 1, "add": 3},
    "xshare per request": {"k0": 1, "add": 0, "add_per_request": 2},
    "xshare by mass": {"mass": 0.5},
    "oea": {"k0": 2, "kmax": 6, "max_rank": 8},
    "pruned": {"k0": 1},
    "lynx-lat": {"retain": 6},
    "lynx-acc": {"confidence": 0.2},
    "moe-spec": {"budget": 6, "coverage": "truncate"},
    "dynamic-skip": {"beta": 0.4},
}


@pytest.mark.parametrize("name", POLICIES)
def test_step_never_waits_for_the_device(name, build, tmp_path):
    """Fake tensors have no data: whatever would bring a value to the host, or a shape that depends on one, raises."""
    layers, policy = {"1": {"policy": "vanilla"}} if name == "xshare" else {}, name.split()[0]
    asked = flags(policy, **POLICIES[name], layers=layers, phases=["verify"])
    with FakeTensorMode(allow_non_fake_inputs=True):
        trace = str(tmp_path / "trace")
        model, installed = build(2, **asked, expert_policy_trace=trace, speculative_algorithm="EAGLE3")
        installed.reads_padding = True
        model.logits = torch.randn(12, EXPERTS)
        with pytest.raises(DataDependentOutputException):
            model.logits.sum().item()
        batch = forward_batch("verify", 12, batch_size=3, padding=4)
        with RefuseHostData():
            model.forward(None, None, batch)
    assert model.routed[0][1].shape == (12, 6 if policy == "oea" else TOP_K)


def test_step_of_many_ranks_never_waits_for_the_device(build, monkeypatch):
    """Data-parallel attention: only the mask tells that a rank is idle, or has fewer requests than others."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, _ = build(2, **XSHARE, speculative_algorithm="EAGLE3")
        batches = gathered_batches("verify", [2, 1, 0], draft_tokens=4)
        monkeypatch.setattr("sglang_xshare.stage.step.gather_rows", Gather(batches))
        model.logits = torch.randn(24, EXPERTS)
        for batch in batches:
            with RefuseHostData():
                model.forward(None, None, batch)
            assert model.routed[0][1].shape == (24, TOP_K)


def test_a_step_counts_where_the_one_before_did(build, monkeypatch, tmp_path):
    """A replay writes to the tensors of its capture, also after a report, a comparison and a switch."""
    monkeypatch.setattr("sglang_xshare.stage.record.counters.load", lambda: None)  # as on a GPU
    model, installed = build(1, **XSHARE, tp_size=2, expert_policy_trace=str(tmp_path / "trace"))
    trace, agreement = installed.trace, installed.agreement
    agreement._gather = lambda own, ranks: own.repeat(ranks)
    written = []
    for _ in range(2):
        run(model, "decode", 4, alone=True)
        written.append([installed.acting.counters.totals, trace.ring, trace.recorded, agreement._checksum])
        trace.write()
        agreement.compare()
        agreement.begin()
    assert all(now is before for before, now in zip(*written, strict=True))


def test_orders_of_many_layers_stay_on_the_device():
    """What a captured graph reads must neither be made anew nor be freed, however many plans there are."""
    orders = [torch.randperm(EXPERTS).tolist() for _ in range(200)]
    plans = [build_plan("moe-spec", budget=6, ranking="static", order=order) for order in orders]
    logits = torch.randn(4, EXPERTS)
    for plan in plans:
        select(logits, plan, Router(TOP_K))
    with RefuseHostData():
        for plan in plans:
            select(logits, plan, Router(TOP_K))
