"""As many experts are active in dummy checkpoints as in trained models: redrawn tensors, then the server's counts."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmark.common.evidence import evidence_between, read_settled_totals, read_totals
from benchmark.common.server import Server
from benchmark.gpu import dummy_server
from benchmark.gpu.dummy_server import MXFP4_SCALE, initialize
from benchmark.gpu.models import CONFIGS, write_model
from benchmark.gpu.serving import DUMMY_SERVER
from served.family import INTERPRETED, TRITON_ATTENTION

HIDDEN, EXPERTS, ROWS = 256, 128, 16
# OEA, Table 4: 16 rows of Qwen3-30B-A3B make 48.8 of 128 experts active. Nearly independent rows of gpt-oss's top-4 of
# 128 make it 50 (simulated, 200 batches).
QWEN3, GPT_OSS = 48.0, 50.0
NEAR = 0.1


def dummy_model(gate: str, model_type: str = "qwen3_moe") -> nn.Module:
    """Its MoE block is as upstream's, with a gate beside a `topk`."""
    block = nn.ModuleDict({"topk": nn.Identity(), gate: nn.Linear(HIDDEN, EXPERTS)})
    model = nn.Module()
    vars(model)["config"] = SimpleNamespace(model_type=model_type)
    model.embed_tokens, model.norm, model.mlp = nn.Embedding(1000, HIDDEN), nn.LayerNorm(HIDDEN), block
    model.other = nn.Linear(4, 4)
    model.register_buffer("w13_weight", torch.zeros(64, 64, dtype=torch.uint8))
    model.register_buffer("w13_weight_scale", torch.zeros(64, dtype=torch.uint8))
    for tensor in model.parameters():
        nn.init.uniform_(tensor, -1e-3, 1e-3)
    return model


@pytest.mark.parametrize(
    ("gate", "model_type", "top_k", "expected"), [("gate", "qwen3_moe", 8, QWEN3), ("router", "gpt_oss", 4, GPT_OSS)]
)
@torch.no_grad()
def test_rows_agree_as_those_of_a_real_batch(gate, model_type, top_k, expected):
    model = dummy_model(gate, model_type)
    other = model.other.weight.clone()
    initialize(model)
    hidden = nn.functional.rms_norm(model.embed_tokens.weight, (HIDDEN,))
    logits = getattr(model.mlp, gate)(hidden)
    assert logits.std(1).mean() == pytest.approx(1, abs=0.1)
    active = [logits[i : i + ROWS].topk(top_k).indices.unique().numel() for i in range(0, 992, ROWS)]
    assert sum(active) / len(active) == pytest.approx(expected, rel=NEAR)
    assert torch.equal(model.norm.weight, torch.ones(HIDDEN))
    assert not torch.cat([model.norm.bias, getattr(model.mlp, gate).bias]).any()
    assert torch.equal(model.other.weight, other)
    assert model.w13_weight.unique().numel() == 256
    assert torch.equal(model.w13_weight_scale, torch.full((64,), MXFP4_SCALE, dtype=torch.uint8))


def test_the_last_token_of_a_verify_step_is_drawn(monkeypatch):
    """Two requests of four tokens each, three accepted: the third place of each is another token at every step."""
    from sglang.srt.speculative import spec_utils

    monkeypatch.setattr(dummy_server, "_vocabulary", [50_000, 60_000])
    monkeypatch.setattr(spec_utils, "generate_simulated_accept_index", spec_utils.generate_simulated_accept_index)
    dummy_server.draw_bonus_tokens()
    drawn = set()
    for _ in range(8):
        predict, correct = torch.full((8,), -5, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        accepted = spec_utils.generate_simulated_accept_index(
            accept_index=torch.tensor([[0, -1, -1, -1], [4, -1, -1, -1]], dtype=torch.int32),
            predict=predict,
            num_correct_drafts=correct,
            candidates=torch.arange(8).reshape(2, 4),
            target_predict=torch.full((2, 4), 9),
            bs=2,
            spec_steps=3,
            simulate_acc_len=3,
            simulate_acc_method="match-expected",
            simulate_acc_token_mode="real-draft-token",
        )
        assert accepted.tolist() == [[0, 1, 2, -1], [4, 5, 6, -1]]
        assert predict[[0, 1, 4, 5]].tolist() == [1, 2, 5, 6], "drafts stay"
        assert predict[[3, 7]].tolist() == [-5, -5]
        drawn |= set(predict[[2, 6]].tolist())
    assert len(drawn) > 8
    assert drawn <= set(range(50_000))


SMALL_GPT_OSS = {
    **{"intermediate_size": 64, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"layer_types": ["sliding_attention", "full_attention"], "quantization_config": None, "pad_token_id": 0},
    "dtype": "float32",  # attention takes it from there
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "small", "flags", "env", "expected"),
    [
        ("qwen3-30b-a3b", {"moe_intermediate_size": 64}, (), {}, QWEN3),
        ("gpt-oss-120b", SMALL_GPT_OSS, TRITON_ATTENTION, INTERPRETED, GPT_OSS),
    ],
)
def test_the_server_counts_as_many_experts_as_a_trained_models(
    name, small, flags, env, expected, tmp_path, monkeypatch
):
    small = {"num_hidden_layers": 2, "vocab_size": 2048, "eos_token_id": 0} | small
    config = {key: value for key, value in (CONFIGS[name] | small).items() if value is not None}
    monkeypatch.setitem(CONFIGS, name, config)
    model = write_model(name, Path(tmp_path))
    args = ["--load-format", "dummy", "--enable-metrics", "--expert-policy", "xshare", "--dtype", "float32", *flags]
    with Server(model, args, env=env, program=DUMMY_SERVER) as server:
        before = read_totals(server)
        prompts = torch.randint(1, 2000, (ROWS, 8), generator=torch.Generator().manual_seed(0)).tolist()
        server.generate(prompts, max_new_tokens=16, ignore_eos=True, temperature=1.0)
        evidence = evidence_between(before, read_settled_totals(server))
    assert evidence.experts_before == pytest.approx(expected, rel=NEAR)
    assert evidence.experts_after < evidence.experts_before
