"""What is wrapped around SGLang's own calls: when a stage hears of them, and what the caller gets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare import hooks
from sglang_xshare.stage.forward import wrap_router
from stage.fake import TOP_K, XSHARE, Model, forward_batch, outcomes, replay, run


def test_ranks_compare_after_forwards_that_the_model_does_not_see(build):
    """A captured graph's replay passes the model runner alone."""
    model, installed = build(**XSHARE, tp_size=2)
    compared: list[int] = []

    def gather(own: torch.Tensor, ranks: int) -> torch.Tensor:
        compared.append(int(own))
        return own.repeat(ranks)

    installed.agreement._gather = gather
    run(model, "decode", 4)
    assert len(compared) == 1
    assert compared[0] != 0, "after what was selected in this forward was counted"
    replay(forward_batch("decode", 4))
    assert len(compared) == 2


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


def test_a_router_that_sees_other_rows_than_the_step_is_refused_at_any_time(build):
    """The compiled call that is kept for the plan must not hide this. From 8 to 15 rows xshare has one plan."""
    model, _ = build(2, **XSHARE)
    for _ in range(2):
        run(model, "decode", 12)
    with pytest.raises(RuntimeError, match=r"MoE layer 0: router rows must be 10 \(got 12\)"):
        model.forward(None, None, forward_batch("decode", 10))
    model.logits = model.logits[:10]
    with pytest.raises(RuntimeError, match=r"^MoE layer 0: router rows must be 12 \(got 10\)$"):
        model.forward(None, None, forward_batch("decode", 12))


def test_vanilla_forward_can_be_compiled(attach):
    """As piecewise prefill graphs: the stage breaks none, and their compilation is no forward of the runner."""
    model = Model(2)

    @torch.compile(fullgraph=True, backend="eager")
    def layers(hidden: torch.Tensor) -> torch.Tensor:
        for config in model.configs:
            hidden = hidden * hooks.route(config, hidden).top_k
        return hidden

    model.forward = lambda input_ids, positions, forward_batch: layers(torch.ones(1)).item()
    installed = attach(model, **XSHARE)
    assert model.runner.forward(forward_batch("prefill", 4)) == TOP_K**2
    assert layers(torch.ones(1)).item() == TOP_K**2
    assert outcomes(installed) == {"prefill": 1}
