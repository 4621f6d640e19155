"""Checkpoint folders: what is written is the model that was trained, under the names servers read."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeForCausalLM, Qwen3MoeForCausalLM

from small import small_qwen3
from training.export import export, in_bfloat16, untied
from training.models import grouped
from training.tokenizer import train_tokenizer

TEXT = "def add(a, b):\n    return a + b  # 37 and 48 make 85: naïve ∑\n"
SMALL = small_qwen3(intermediate_size=48, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0)


def test_the_exported_model_and_tokenizer_are_the_trained_ones(tmp_path: Path) -> None:
    """Embeddings that are tied in training are written twice."""
    torch.manual_seed(0)
    trained = Qwen3MoeForCausalLM(SMALL).eval()
    trained.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(parameter.bfloat16())
    exported = Qwen3MoeForCausalLM(SMALL)
    exported.load_state_dict(trained.state_dict())
    export(untied(exported).bfloat16(), train_tokenizer([TEXT], 300, longest=512), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"], "left something beside the folder"
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert served.config.tie_word_embeddings is False
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert [tokenizer.decode(token) for token in tokenizer.encode("1234")] == ["1", "2", "3", "4"]
    assert tokenizer.encode("<|endoftext|>") == [tokenizer.eos_token_id] == [0]
    with torch.inference_mode():
        batch = torch.tensor([ids])
        torch.testing.assert_close(served(batch).logits, trained(batch).logits, rtol=1e-4, atol=1e-5)


def test_correction_biases_stay_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(grouped())
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_()
    biases = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    export(in_bfloat16(untied(model)), train_tokenizer([TEXT], 300, longest=512), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert len(biases) == 4
    for name, bias in biases.items():
        assert torch.equal(weights[name], bias)
    assert {weight.dtype for name, weight in weights.items() if name not in biases} == {torch.bfloat16}
    served = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = dict(served.named_buffers())
    assert all(torch.equal(loaded[name], bias) for name, bias in biases.items())
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {"n_group": 4, "topk_group": 2, "n_routed_experts": 64, "routed_scaling_factor": 2.5}
    assert wanted.items() <= config.items()
