"""Routers of every family that is served on a CPU, found from what transformers' models do: the kind, the selection,
and what it makes of a decode, beside the table of families and its own way of replacing their routing.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from benchmark.quality.model import Layout, load_model, prefill, router_logits
from benchmark.quality.routing import find_gates, find_routers
from served.families import drop_norms, make, read_routers, select_in_decode
from served.family import EXPERTS, FAMILIES, Family
from sglang_xshare import build_plan, select

PROMPT, STEPS, ROWS = 5, 4, 8
PLANS = [build_plan("xshare", k0=1, add=4), build_plan("oea", k0=2)]
every_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory):
    """Call it with a family's name for (family, its model as made, the same read from disk)."""

    @cache
    def read(name: str) -> tuple[Family, PreTrainedModel, PreTrainedModel]:
        folder: Path = tmp_path_factory.mktemp("family")
        made = make(FAMILIES[name], folder)
        loaded = load_model(folder)
        drop_norms(FAMILIES[name], loaded)
        return FAMILIES[name], made, loaded

    return read


@pytest.fixture
def tokens():
    return torch.randint(1, 1024, (ROWS, PROMPT + STEPS), generator=torch.Generator().manual_seed(3))


def describe(router):
    bias = None if router.correction_bias is None else router.correction_bias.flatten().tolist()
    groups = (router.num_expert_group, router.topk_group)
    return router.top_k, router.scoring, router.renormalize, groups, bias


@every_family
def test_a_router_is_found_for_what_it_is(name, load):
    family, made, model = load(name)
    expected = read_routers(family, made)
    found = find_routers(model)
    assert [describe(router) for router in found] == [describe(router) for router in expected.values()]
    config = made.config
    scaling = getattr(config, "routed_scaling_factor", getattr(config, "router_scaling_factor", 1.0))
    assert {router.scaling for router in found} == {scaling}
    assert all(gate.count_experts() == EXPERTS for gate in find_gates(model))


@every_family
def test_selection_equals_the_reference(name, load, tokens):
    """Of the same logits, by the router found and by the table's: the same experts in the same order."""
    family, made, model = load(name)
    with torch.inference_mode():
        logits = router_logits(model, tokens)[:, :, -1]
    for rows, found, expected in zip(logits, find_routers(model), read_routers(family, made).values(), strict=True):
        for plan in PLANS:
            ours, reference = select(rows, plan, found), select(rows, plan, expected, backend="reference")
            assert torch.equal(ours.topk_ids, reference.topk_ids)
            torch.testing.assert_close(ours.topk_weights, reference.topk_weights * found.scaling)
            assert ours.active.sum() < ours.vanilla_active.sum()


@every_family
@pytest.mark.parametrize("plan", PLANS, ids=["xshare", "oea"])
def test_a_decode_at_once_is_one_step_after_the_other(name, plan, load, tokens):
    family, made, model = load(name)
    with torch.inference_mode():
        prompt, text = tokens[:, :PROMPT], tokens[:, PROMPT:]
        logits, routing = prefill(model, prompt).decode(text, plan, Layout(ROWS))
        vanilla, _ = prefill(model, prompt).decode(text, build_plan("vanilla"), Layout(ROWS))
        cache, steps = made(prompt, use_cache=True).past_key_values, []
        with select_in_decode(family, made, plan, ROWS):
            steps = [made(step, past_key_values=cache, use_cache=True).logits for step in text.split(1, 1)]
        own = made(tokens).logits[:, PROMPT:]
    torch.testing.assert_close(logits, torch.cat(steps, 1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(vanilla, own, rtol=1e-3, atol=1e-3)
    assert (logits - vanilla).abs().max() > 0.01
    assert len(routing.active) == len(find_routers(model))


def test_a_router_of_no_known_kind_is_refused(load, tmp_path):
    _, made, _ = load("Mixtral")
    made.save_pretrained(tmp_path)
    model = load_model(tmp_path)

    class Odd(nn.Module):
        def __init__(self, gate: nn.Module) -> None:
            super().__init__()
            self.gate, self.weight = gate, gate.weight

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits, weights, ids = self.gate(hidden)
            return logits, weights.square(), ids

    from benchmark.quality import routing

    for gate in find_gates(model):
        gate.block.gate = Odd(gate.gate)
    routing._ROUTERS.pop(model)
    with pytest.raises(ValueError, match=r"MoE layer 0, Mixtral.*: its routing must be "):
        find_routers(model)
