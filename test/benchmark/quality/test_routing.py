"""Routers of every family that is served on a CPU, found from what transformers' models do: a decode is that of the
table of families, with its own routers and its own way of replacing their routing.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmark.quality import routing
from benchmark.quality.model import Layout, load_model, prefill
from benchmark.quality.routing import find_gates, find_routers
from served.families import drop_norms, make, select_in_decode
from served.family import FAMILIES, Family
from sglang_xshare import build_plan

PROMPT, STEPS, ROWS = 5, 4, 8
PLANS = [build_plan("xshare", k0=1, add=4), build_plan("oea", k0=2)]


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


@pytest.mark.parametrize("name", FAMILIES)
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
    for gate in find_gates(model):
        gate.gate.register_forward_hook(lambda module, args, found: (found[0], found[1].square(), found[2]))
    routing._ROUTERS.pop(model)
    with pytest.raises(ValueError, match=r"MoE layer 0, Mixtral.*: its routing must be "):
        find_routers(model)
