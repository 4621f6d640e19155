"""What is wrapped around SGLang's own calls: when a stage hears of them, and what the caller gets."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare import hooks
from sglang_xshare.stage.forward import wrap_router
from stage.fake import EXPERTS, XSHARE, Model, forward_batch, run, runner


def test_ranks_compare_after_forwards_that_the_model_does_not_see(attach):
    """A captured graph's replay passes the model runner alone."""
    model = Model()
    model.logits = torch.randn(4, EXPERTS)
    attach(model)
    model_runner = runner(model, **XSHARE, tp_size=2)
    replayed = forward_batch("decode", 4)
    model_runner.forward = lambda batch: "replayed" if batch is replayed else model.forward(None, None, batch)
    hooks.attach(model_runner)
    compared: list[int] = []

    def gather(own: torch.Tensor, ranks: int) -> torch.Tensor:
        compared.append(int(own))
        return own.repeat(ranks)

    hooks._stage.agreement._gather = gather
    assert model_runner.forward(forward_batch("decode", 4)) == "output"
    assert len(compared) == 1
    assert compared[0] != 0, "after what was selected in this forward was counted"
    assert model_runner.forward(replayed) == "replayed"
    assert len(compared) == 2


def test_no_frame_outlives_its_forward(attach):
    """SGLang asks whether the next batch may replay a graph before that forward: the answer is not the last frame's."""
    model = Model()
    model.logits = torch.randn(4, EXPERTS)
    attach(model)
    model_runner = runner(model, **XSHARE)
    hooks.attach(model_runner)
    for model.error in (None, RuntimeError("out of memory")):
        with pytest.raises(RuntimeError, match="out of memory") if model.error else nullcontext():
            model_runner.forward(forward_batch("decode", 4))
        assert hooks._stage.current_frame.frame is None


@pytest.mark.parametrize(("has_layer", "is_among_ranks"), [(True, True), (False, True), (True, False)])
def test_a_router_without_rows_selects_with_the_others_before_it_answers(has_layer, is_among_ranks):
    order: list[Any] = []
    layer = SimpleNamespace(join=lambda *args: order.append(args))
    router = SimpleNamespace(
        topk_config=SimpleNamespace(**{"layer": layer} if has_layer else {}),
        empty_topk_output=lambda *args, **kwargs: order.append((args, kwargs)),
    )
    ranks = SimpleNamespace(num_experts=32) if is_among_ranks else None
    wrap_router(router, SimpleNamespace(device="cpu", in_force=SimpleNamespace(ranks=ranks)))
    router.empty_topk_output("cpu", layer_id=3)
    joined = [(32, "cpu")] if has_layer and is_among_ranks else []
    assert order == [*joined, (("cpu",), {"layer_id": 3})]


def test_a_router_that_sees_other_rows_than_the_step_is_refused_at_any_time(attach):
    """Also where a compiled call is kept for its plan."""
    model = Model(2)
    attach(model, expert_policy="xshare", expert_policy_config={"k0": 1, "add": 3})
    for _ in range(2):
        run(model, "decode", 8)
    with pytest.raises(RuntimeError, match=r"MoE layer 0: router rows must be 6 \(got 8\)"):
        model.forward(None, None, forward_batch("decode", 6))
    model.logits = model.logits[:6]
    with pytest.raises(RuntimeError, match=r"MoE layer 0: router rows must be 8 \(got 6\)"):
        model.forward(None, None, forward_batch("decode", 8))
