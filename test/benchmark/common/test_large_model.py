"""The large model, made small: once, the same each time, never half, its router as spread as a trained one's."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmark.common.large_model import ROUTER_LOGIT_SPREAD, configuration, make

SMALL = Qwen3MoeConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=0,
)


def test_it_is_made_once_and_the_same(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "model", tmp_path / "b" / "model"
    assert make(first, SMALL)
    assert make(second, SMALL)
    weights = (first / "model.safetensors").read_bytes()
    assert weights == (second / "model.safetensors").read_bytes()
    assert not make(first, SMALL, seed=1)
    assert weights == (first / "model.safetensors").read_bytes()
    assert [path.name for path in first.parent.iterdir()] == ["model"]


def test_a_failed_make_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("training.export.export", fail)
    with pytest.raises(OSError, match="disk full"):
        make(tmp_path / "model", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_router_logits_are_spread(tmp_path: Path) -> None:
    make(tmp_path / "model", SMALL)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = torch.stack(model(torch.arange(200)[None], output_router_logits=True).router_logits)
    assert logits.std().item() == pytest.approx(ROUTER_LOGIT_SPREAD, rel=0.2)


def test_the_full_size_is_what_the_tables_say() -> None:
    config = configuration(vocab_size=4096)
    shape = (config.num_experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size)
    assert (*shape, config.num_hidden_layers) == (128, 8, 1024, 512, 4)
