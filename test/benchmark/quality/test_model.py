"""Routing by `select()` over all positions at once is what step-by-step decoding does."""

from itertools import product

import pytest
import torch
from transformers import PreTrainedModel

from benchmark.quality.model import Layout, prefill, router_of
from sglang_xshare import Batch, SelectionPlan, build_plan, select

PROMPT, STEPS, SEQUENCES = 6, 12, 8
HARSH = [
    build_plan("xshare", k0=1, add=2),
    build_plan("xshare", k0=1, add=0, add_per_request=1),
    build_plan("pruned", k0=2),
    build_plan("oea", k0=2, kmax=6),
    build_plan("moe-spec", budget=5, coverage="truncate", rescue=False),
]
FULL = [
    build_plan("vanilla"),
    build_plan("xshare", k0=1, add=16),
    build_plan("oea", k0=4),
    build_plan("moe-spec", budget=16),
    build_plan("lynx-lat", drop=0),
]


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(300, (SEQUENCES, PROMPT + STEPS), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def decode(model: PreTrainedModel, tokens: torch.Tensor, plan: SelectionPlan, layout: Layout) -> torch.Tensor:
    return prefill(model, tokens[:, :PROMPT]).decode(tokens[:, PROMPT:], plan, layout)[0]


@torch.inference_mode()
def decode_slowly(
    model: PreTrainedModel, tokens: torch.Tensor, plan: SelectionPlan, layout: Layout
) -> tuple[torch.Tensor, list[int]]:
    """One forward a step and batch, as a server would: logits, and the active experts of every layer and step."""
    router, active = router_of(model)[0], []

    def route(gate, args, output):
        chosen = select(output[0], plan, router, Batch(tokens_per_request=layout.tokens_per_request))
        active.append(int(chosen.active.sum()))
        return output[0], chosen.topk_weights, chosen.topk_ids.long().clamp(min=0)

    rows = []
    for batch in tokens.split(layout.batch):
        cache = model(batch[:, :PROMPT], use_cache=True).past_key_values
        hooks = [layer.mlp.gate.register_forward_hook(route) for layer in model.model.layers]
        steps = batch[:, PROMPT:].split(layout.tokens_per_request, 1)
        rows.append(torch.cat([model(step, past_key_values=cache).logits for step in steps], 1))
        for hook in hooks:
            hook.remove()
    return torch.cat(rows), active


@pytest.mark.parametrize(("plan", "tokens_per_request"), list(product(FULL, (1, 3))))
def test_full_budget_leaves_the_model_as_it_is(model, tokens, plan, tokens_per_request):
    with torch.inference_mode():
        expected = model(tokens).logits[:, PROMPT:]
    torch.testing.assert_close(decode(model, tokens, plan, Layout(4, tokens_per_request)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("plan", "tokens_per_request"), list(product(HARSH, (1, 3))))
def test_all_steps_at_once_equal_one_after_the_other(model, tokens, plan, tokens_per_request):
    layout = Layout(4, tokens_per_request)
    with torch.inference_mode():
        logits, routing = prefill(model, tokens[:, :PROMPT]).decode(tokens[:, PROMPT:], plan, layout)
    expected, active = decode_slowly(model, tokens, plan, layout)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert sorted(torch.cat(routing.active).tolist()) == sorted(active)
    assert (logits - decode(model, tokens, FULL[0], layout)).abs().max() > 0.01


@pytest.mark.parametrize("layout", [Layout(3), Layout(2, 4)])
def test_leftover_rows_are_an_error(layout):
    with pytest.raises(ValueError, match="must divide"):
        layout.split(torch.zeros(4, 6, 1))
