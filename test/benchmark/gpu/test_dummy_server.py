"""As many experts are active in dummy checkpoints as in trained models: redrawn tensors, then the server's counts."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmark.common.evidence import evidence_between, read_settled_totals, read_totals
from benchmark.common.server import Server
from benchmark.gpu.dummy_server import MXFP4_SCALE, initialize
from benchmark.gpu.models import CONFIGS, write_model
from benchmark.gpu.serving import DUMMY_SERVER
from served.family import INTERPRETED, TRITON_ATTENTION

HIDDEN, EXPERTS, TOP_K, ROWS = 256, 128, 8, 16
# OEA, Table 4: 16 rows of Qwen3-30B-A3B make 48.8 of 128 experts active. The same agreement of rows at gpt-oss's top-4
# of 128 makes it 29.8, of 32 18.5 (simulated, 200 batches).
QWEN3, GPT_OSS = 48.0, 29.8
NEAR = 0.1


class Block(nn.Module):
    """As upstream's MoE blocks: a gate beside a `topk`."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.topk = nn.Identity()
        setattr(self, gate, nn.Linear(HIDDEN, EXPERTS))


def dummy_model(gate: str) -> nn.Module:
    model = nn.Module()
    model.embed_tokens, model.norm, model.mlp = nn.Embedding(1000, HIDDEN), nn.LayerNorm(HIDDEN), Block(gate)
    model.other = nn.Linear(4, 4)
    model.register_buffer("w13_weight", torch.zeros(64, 64, dtype=torch.uint8))
    model.register_buffer("w13_weight_scale", torch.zeros(64, dtype=torch.uint8))
    for tensor in model.parameters():
        nn.init.uniform_(tensor, -1e-3, 1e-3)
    return model


@pytest.mark.parametrize("gate", ["gate", "router"])
@torch.no_grad()
def test_rows_agree_as_those_of_a_real_batch(gate):
    model = dummy_model(gate)
    other = model.other.weight.clone()
    initialize(model)
    hidden = nn.functional.rms_norm(model.embed_tokens.weight, (HIDDEN,))
    logits = getattr(model.mlp, gate)(hidden)
    assert logits.std(1).mean() == pytest.approx(1, abs=0.1)
    active = [logits[i : i + ROWS].topk(TOP_K).indices.unique().numel() for i in range(0, 992, ROWS)]
    assert sum(active) / len(active) == pytest.approx(QWEN3, rel=NEAR)
    assert torch.equal(model.norm.weight, torch.ones(HIDDEN))
    assert not model.norm.bias.any()
    assert not getattr(model.mlp, gate).bias.any()
    assert torch.equal(model.other.weight, other)
    assert model.w13_weight.unique().numel() == 256
    assert torch.equal(model.w13_weight_scale, torch.full((64,), MXFP4_SCALE, dtype=torch.uint8))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "small", "flags", "env", "expected"),
    [
        ("qwen3-30b-a3b", {"num_hidden_layers": 2, "moe_intermediate_size": 64, "vocab_size": 2048}, (), {}, QWEN3),
        (
            "gpt-oss-120b",
            {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 2048, "hidden_size": 256}
            | {"num_attention_heads": 4, "num_key_value_heads": 2, "quantization_config": None}
            | {"layer_types": ["sliding_attention", "full_attention"], "eos_token_id": 0, "pad_token_id": 0}
            | {"dtype": "float32"},  # attention takes it from there
            TRITON_ATTENTION,
            INTERPRETED,
            GPT_OSS,
        ),
    ],
)
def test_the_server_counts_as_many_experts_as_a_trained_models(
    name, small, flags, env, expected, tmp_path, monkeypatch
):
    config = {key: value for key, value in (CONFIGS[name] | {"eos_token_id": 0} | small).items() if value is not None}
    monkeypatch.setitem(CONFIGS, name, config)
    model = write_model(name, Path(tmp_path))
    assert json.loads((model / "config.json").read_text())["num_hidden_layers"] == 2
    args = ["--load-format", "dummy", "--enable-metrics", "--expert-policy", "xshare", "--dtype", "float32", *flags]
    with Server(model, args, env=env, program=DUMMY_SERVER) as server:
        before = read_totals(server)
        prompts = torch.randint(1, 2000, (ROWS, 8), generator=torch.Generator().manual_seed(0)).tolist()
        server.generate(prompts, max_new_tokens=16, ignore_eos=True, temperature=1.0)
        evidence = evidence_between(before, read_settled_totals(server))
    assert evidence.experts_before == pytest.approx(expected, rel=NEAR)
    assert evidence.experts_after < evidence.experts_before
