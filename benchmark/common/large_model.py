"""The large random Qwen3-MoE for speed, made where it does not exist yet: under a minute and 1.6 GB.

Loading experts dominates its decode steps on a CPU as it does a production model's on a GPU. Its text is noise, its
routing is not: router weights are scaled to logits as spread as a trained router's.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.common.paths import LARGE, TRAINED

if TYPE_CHECKING:
    from transformers import Qwen3MoeConfig

    from sglang_xshare.estimate.weights import Weights

ROUTER_LOGIT_SPREAD = 2.0  # standard deviation


def configuration(vocab_size: int) -> Qwen3MoeConfig:
    """128 experts of which 8 run, hidden 1024, expert width 512, 4 layers: 820 million parameters, 1.6 GB."""
    import torch
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        dtype=torch.bfloat16,
    )


def read_generated() -> Weights:
    """The bytes of its decode step. It need not have been made."""
    from sglang_xshare.estimate.weights import read_weights

    vocab_size = json.loads((TRAINED / "config.json").read_text())["vocab_size"]
    config = configuration(vocab_size).to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return read_weights(Path(folder))


def make(folder: Path = LARGE, config: Qwen3MoeConfig | None = None, seed: int = 0) -> bool:
    """Write the checkpoint into `folder` at once, never half; false where it was there already."""
    if folder.exists():
        return False
    import torch  # here, since most who ask find it made
    from transformers import AutoTokenizer, Qwen3MoeForCausalLM

    from training.export import export

    began = time.monotonic()
    print(f"{folder}: making it", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM._from_config(config or configuration(len(tokenizer)), dtype=torch.bfloat16)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight, std=ROUTER_LOGIT_SPREAD * model.config.hidden_size**-0.5)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        export(model, tokenizer, Path(scratch) / folder.name)
        (Path(scratch) / folder.name).rename(folder)
    print(f"{folder}: made in {time.monotonic() - began:.0f} s", flush=True)
    return True
