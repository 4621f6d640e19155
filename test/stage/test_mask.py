"""Masked logits, ranked and softmaxed the way a runner does it, give back the selection."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_xshare import Batch, Router, RunnerSlots, build_plan, hooks, select
from sglang_xshare.selection.mask import check_maskable, mask_logits
from sglang_xshare.stage import layer as layer_module
from sglang_xshare.stage.layer import DROPPED, MASKED, Convention, Layer
from sglang_xshare.stage.step import Step
from stage.fake import put_in_step


def route(masked: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the runner does: the top-k logits, softmaxed."""
    values, ids = masked.float().topk(top_k, -1)
    return values.softmax(-1), ids


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(2, 20),
    policy=st.sampled_from(
        [("xshare", {"k0": 1, "add": 3}), ("oea", {"k0": 2}), ("pruned", {"k0": 1}), ("vanilla", {})]
    ),
    padding=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 999),
)
def test_runner_gets_the_selection(rows, policy, padding, dtype, seed):
    torch.manual_seed(seed)
    logits = torch.randn(rows, 32).to(dtype)
    valid = torch.arange(rows) < max(rows - padding, 1)
    out = select(logits, build_plan(policy[0], **policy[1]), Router(top_k=4), Batch(valid=valid))
    masked, in_use = mask_logits(logits, out, top_k=4)
    weights, ids = route(masked, 4)
    ranked = torch.zeros(32, dtype=torch.bool)
    ranked[ids.flatten()] = True
    assert not (ranked & ~in_use).any(), "the runner uses an expert that was not counted"
    assert in_use.sum() == max(4, out.active.sum())
    for row in range(rows):
        if not valid[row]:
            continue
        got = {int(i): float(w) for i, w in zip(ids[row], weights[row], strict=True) if w > 0}
        want = {int(i): float(w) for i, w in zip(out.topk_ids[row], out.topk_weights[row], strict=True) if i >= 0}
        assert got == pytest.approx(want, abs=1e-5)


def test_a_row_keeps_expert_0_beside_empty_slots():
    """The ids of empty slots are clamped to 0 as well."""
    logits = torch.eye(2, 8)
    out = select(logits, build_plan("pruned", k0=1), Router(top_k=4))
    weights, ids = route(mask_logits(logits, out, top_k=4)[0], 4)
    assert (ids[:, 0].tolist(), weights[:, 0].tolist()) == ([0, 1], [1, 1])


@pytest.mark.parametrize(
    ("plan", "router", "named"),
    [
        (build_plan("moe-spec", budget=8, coverage="truncate"), Router(top_k=4), "truncate"),
        (build_plan("oea", k0=1, own_share=0.5), Router(top_k=4), "own_share = 0.5"),
        (build_plan("oea", k0=1, kmax=6), Router(top_k=4), "kmax = 6"),
        (build_plan("oea", k0=1), Router(top_k=4, renormalize=False), "renormalizing"),
        (build_plan("oea", k0=1), Router(top_k=4, scoring="sigmoid"), "softmax"),
        (build_plan("oea", k0=1), Router(top_k=4, correction_bias=torch.zeros(8)), "plain softmax"),
        (build_plan("oea", k0=1), Router(top_k=4, num_expert_group=4, topk_group=2), "plain softmax"),
        (build_plan("oea", k0=1), Router(top_k=4, quota_groups=2), "one group"),
        (build_plan("oea", k0=1), Router(top_k=4, expert_scale=torch.ones(8)), "without a scale"),
    ],
)
def test_what_logits_cannot_express_is_refused(plan, router, named):
    with pytest.raises(ValueError, match=named):
        check_maskable(plan, router)


@pytest.fixture
def forward(monkeypatch):
    """(what TopK.forward_cuda returns, the layer) of a convention, by output format and logits."""
    from sglang.srt.layers.moe import topk

    def run(output_format: str, convention: Convention, logits: torch.Tensor, on: bool = True) -> tuple[Any, Layer]:
        config = topk.TopKConfig(4, renormalize=True, output_format=topk.TopKOutputFormat[output_format])
        module = object.__new__(topk.TopK)
        torch.nn.Module.__init__(module)
        vars(module).update(topk_config=config, layer_id=0, is_draft=True, waterfill_balancer=None)
        module.enable_waterfill = False
        layer = Layer(0, config, None, convention=convention, runner_ranks_logits=True)
        put_in_step(layer, build_plan("oea", k0=1), Step("decode", len(logits), Batch()))
        module.topk_config = layer.plain_config
        monkeypatch.setattr(hooks, "_stage", object() if on else None)
        return topk.TopK.forward_cuda(module, torch.randn(len(logits), 8), logits), layer

    # The device's kernel, and what asks for a server.
    monkeypatch.setattr(topk, "routing", lambda logits, *args, **kwargs: (logits,) * 5, raising=False)
    monkeypatch.setattr(topk, "is_allocation_symmetric", lambda: False)
    monkeypatch.setattr(topk, "get_parallel", lambda: SimpleNamespace(tp_group=None))
    return run


@pytest.mark.parametrize("output_format", ["TRITON_KERNEL", "BYPASSED"])
def test_upstream_hands_the_masked_logits_to_a_runner_that_ranks_them(output_format, forward):
    logits = torch.randn(6, 32)
    found, layer = forward(output_format, MASKED, logits)
    assert type(found).__name__.lower().startswith(output_format.split("_")[0].lower())
    seen = found.gate_scal if output_format == "TRITON_KERNEL" else found.raw_router_logits
    # FlashInfer's kernel gets them as bfloat16 and must find there what was chosen.
    assert seen.dtype == (torch.float32 if output_format == "TRITON_KERNEL" else torch.bfloat16)
    weights, ids = route(seen, 4)
    assert set(ids[weights > 0].tolist()) <= set(layer.model_forward.selections[0].active.nonzero().flatten().tolist())
    assert layer.model_forward.selections[0].vanilla_active.sum() > layer.model_forward.selections[0].active.sum()
    found, _ = forward(output_format, MASKED, logits, on=False)
    assert (found.gate_scal if output_format == "TRITON_KERNEL" else found.raw_router_logits) is logits, "off means off"


@pytest.mark.parametrize("slots", [RunnerSlots(empty=True), RunnerSlots()])
def test_upstream_hands_over_what_routing_would_return(slots, forward, monkeypatch):
    """With the contract known, no logits are masked and upstream's `routing()` is not called."""
    from sglang.srt.layers.moe import topk

    asked = []
    contract = SimpleNamespace(slots=slots, pack=lambda ids, weights, logits: (ids, weights, logits))
    monkeypatch.setattr(layer_module, "find_contract", lambda logits, top_k: asked.append(top_k) or contract)
    monkeypatch.setattr(topk, "routing", None)
    logits = torch.randn(6, 32)
    (ids, weights, seen), layer = forward("TRITON_KERNEL", MASKED, logits)
    assert asked == [4]
    assert seen is logits
    out = select(logits, build_plan("oea", k0=1), Router(top_k=4), Batch(), slots=slots)
    assert torch.equal(ids, out.topk_ids)
    assert torch.equal(weights, out.topk_weights)
    assert layer.model_forward.selections[0].masked_logits is None
    assert torch.equal(layer.model_forward.selections[0].active, out.active)
    forward("BYPASSED", MASKED, logits)
    assert asked == [4], "FlashInfer's kernel ranks logits"
    layer.router = replace(layer.router, scaling=2.5)
    output_format, masked = layer.prepare(topk.TopKOutputFormat.TRITON_KERNEL, logits)
    assert output_format == topk.TopKOutputFormat.TRITON_KERNEL, "routing() does not scale"
    assert masked.shape == logits.shape


def test_upstream_hands_ids_to_a_runner_that_would_route_itself(forward):
    logits = torch.randn(6, 32)
    found, layer = forward("BYPASSED", DROPPED, logits)
    assert type(found).__name__ == "StandardTopKOutput"
    assert torch.equal(found.topk_ids, layer.model_forward.selections[0].topk_ids)
    assert torch.equal(found.topk_weights, layer.model_forward.selections[0].topk_weights)
    found, _ = forward("BYPASSED", DROPPED, logits, on=False)
    assert type(found).__name__ == "BypassedTopKOutput", "prefill stays in the runner"
