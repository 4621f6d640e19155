"""The load of the experts: the penalty at its two ends, and biases that bring a lopsided router into balance."""

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from training.balance import BIAS_RATE, balance_loss, correction_biases, loss_with_moved_biases, watch_experts

EXPERTS = 16
SMALL = Glm4MoeConfig(
    **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    **{"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2},
    **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 0, "initializer_range": 0.5},
)


def test_balance_is_one_at_uniform_load_and_the_experts_at_collapse() -> None:
    uniform = torch.eye(8).repeat(4, 1) * 1e-3  # every expert first equally often, shares nearly equal
    collapsed = torch.tensor([50.0] + [0.0] * 7).repeat(32, 1)
    assert balance_loss((uniform,), 1).item() == pytest.approx(1, abs=1e-3)
    opposite = (collapsed, collapsed.flip(1))
    assert balance_loss(opposite, 1).item() == pytest.approx(8), "two layers must not balance each other"


def test_the_loss_is_the_models_own_and_biases_even_the_load() -> None:
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(SMALL)
    ids = torch.randint(50, (8, 32), generator=torch.Generator().manual_seed(1))

    def spread() -> float:
        with watch_experts(model) as chosen, torch.no_grad():
            model(ids)
        loads = [experts.flatten().bincount(minlength=EXPERTS).float() for experts in chosen]
        return max(float(load.max() / load.mean()) for load in loads)

    before = spread()
    loss = loss_with_moved_biases(model, ids)
    loss.backward()
    assert model.model.layers[0].mlp.gate.weight.grad.any()
    for bias in correction_biases(model):
        assert bias.abs().max().item() == pytest.approx(BIAS_RATE)
        bias.zero_()
    assert loss.item() == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
    for _ in range(100):
        with torch.no_grad():
            loss_with_moved_biases(model, ids)
    assert 1.1 < spread() < 0.75 * before
