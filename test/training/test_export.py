"""Checkpoint folders: what is written is the model that was trained, under the names servers read."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeForCausalLM

from training.export import export, in_bfloat16, untied
from training.models import grouped
from training.tokenizer import train_tokenizer

TEXT = "def add(a, b):\n    return a + b  # 37 and 48 make 85: naïve ∑\n"


def test_the_exported_model_and_tokenizer_are_the_trained_ones(tmp_path: Path) -> None:
    """Embeddings that are tied in training are written twice, and correction biases in float32."""
    torch.manual_seed(0)
    trained = Glm4MoeForCausalLM(grouped()).eval()
    biases = {name: buffer.normal_() for name, buffer in trained.named_buffers() if name.endswith("correction_bias")}
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(parameter.bfloat16())
    export(in_bfloat16(untied(trained)), train_tokenizer([TEXT], 300, longest=512), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"], "left something beside the folder"
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert {weight.dtype for name, weight in weights.items() if name not in biases} == {torch.bfloat16}
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    loaded = dict(served.named_buffers())
    assert len(biases) == 4
    for name, bias in biases.items():
        assert torch.equal(weights[name], bias)
        assert torch.equal(loaded[name], bias)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {"n_group": 4, "topk_group": 2, "n_routed_experts": 64, "routed_scaling_factor": 2.5}
    assert wanted.items() <= config.items()
    assert served.config.tie_word_embeddings is False
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert [tokenizer.decode(token) for token in tokenizer.encode("1234")] == ["1", "2", "3", "4"]
    assert tokenizer.encode("<|endoftext|>") == [tokenizer.eos_token_id] == [0]
    with torch.inference_mode():
        batch = torch.tensor([ids])
        torch.testing.assert_close(served(batch).logits, trained(batch).logits, rtol=1e-4, atol=1e-5)
